"""Measurement of an export: agreement with its encoder, scores of both, bytes, and texts a second on this machine."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from declutr.common.bootstrap import compare, spearman
from declutr.encoders.protocol import SentenceEncoder, unit_rows
from declutr.encoders.static import StaticEncoder
from declutr.evaluation.retrieval.compare import differences, score_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.pairs import RetrievalTest
from declutr.evaluation.retrieval.similarity import stsb_values

_ROUNDS = 5
_ALONE = 32
_SEED = 0
TORCH = "torch"
"""Name of the encoder itself among the sides of the timing."""


@dataclass(frozen=True)
class Yardstick:
    """Texts and data on which encoder and export are compared.

    Attributes:
        texts: on which vectors and seconds are compared.
        stsb: folder of STS-B; None without.
        test: the user's retrieval test; None without.
    """

    texts: Sequence[str]
    stsb: Path | None = None
    test: RetrievalTest | None = None


def measure(
    before: SentenceEncoder,
    after: SentenceEncoder,
    floats: Mapping[str, SentenceEncoder],
    yardstick: Yardstick,
) -> dict[str, Any]:
    """Figures of an export.

    Args:
        before: the encoder.
        after: the export.
        floats: other forms in float32, by name; the fastest of them and `before` is what the export is compared with.
        yardstick: texts and data.
    """
    texts = list(yardstick.texts)
    first, second = before.encode(texts), after.encode(texts)
    alone = np.concatenate([after.encode([text]) for text in texts[:_ALONE]])
    found: dict[str, Any] = {"texts": len(texts), "size_before": before.size, "size": after.size}
    if not isinstance(after, StaticEncoder):
        cosines = (unit_rows(first.astype(np.float64)) * unit_rows(second.astype(np.float64))).sum(axis=1)
        filled = cosines[np.abs(first).max(axis=1) > 0]
        found |= {"cosine": float(filled.mean()), "cosine_least": float(filled.min())}
    else:  # principal components are another basis
        found |= {"cosine": None, "cosine_least": None}
    found["difference_alone"] = float(np.abs(alone - second[:_ALONE]).max())
    if yardstick.stsb is not None:
        one = compare(stsb_values(before, yardstick.stsb), stsb_values(after, yardstick.stsb), _SEED, spearman)
        found |= {"stsb_before": 100 * one.before, "stsb_after": 100 * one.after}
        found["stsb_interval"] = one.interval and [100 * end for end in one.interval]
    if yardstick.test is not None:
        lexicon = Lexicon(yardstick.test.texts)
        rows = [score_encoder(yardstick.test, each, lexicon)[0] for each in (before, after)]
        found["pairs"] = {
            name: {"before": one.before, "after": one.after, "interval": one.interval}
            for name, one in differences(*rows).items()
        }
    return found | _timed({TORCH: before, **floats}, after, texts)


def _timed(floats: Mapping[str, SentenceEncoder], after: SentenceEncoder, texts: list[str]) -> dict[str, Any]:
    """Texts a second of every side, in turns, and the quotients of the fastest in float32 and the export."""
    sides = {**floats, "export": after}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(_ROUNDS + 1):  # the first round warms up
        for name in sorted(sides, reverse=bool(number % 2)):
            begun = time.perf_counter()
            sides[name].encode(texts)
            if number:
                seconds[name].append(max(time.perf_counter() - begun, 1e-9))
    fastest = min(floats, key=lambda name: statistics.median(seconds[name]))
    ratios = [one / own for one, own in zip(seconds[fastest], seconds["export"], strict=True)]
    return {
        "texts_per_second": {name: round(len(texts) / statistics.median(each), 1) for name, each in seconds.items()},
        "compared_with": fastest,
        "speedup": round(statistics.median(ratios), 3),
        "speedup_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
