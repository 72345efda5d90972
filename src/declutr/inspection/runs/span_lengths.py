"""Lengths of the spans that a run draws, against the law of its settings. NumPy alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc

from declutr.inspection.order import TaskOrder
from declutr.inspection.runs.record import F64
from declutr.pipeline.shards.shards import ragged
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.spans import sample_spans

_DOCUMENTS = 1024
_BINS = 24


@dataclass(frozen=True)
class Lengths:
    """Lengths of one kind of spans.

    Attributes:
        kind: `anchors` or `positives`.
        number: number of spans.
        middle: `(bins,)` middles of the bins, in tokens.
        found: `(bins,)` share of the spans in each bin.
        law: `(bins,)` share by the law.
        distance: largest difference of the two distribution functions (Kolmogorov and Smirnov).
    """

    kind: str
    number: int
    middle: F64
    found: F64
    law: F64
    distance: float


def span_lengths(task: TaskOrder) -> Iterator[Lengths]:
    """Lengths of the spans of the run's first documents; none of a task without spans.

    An anchor has int(B (longest - shortest)) + shortest tokens, B of the Beta distribution `anchor_beta`, and a
    positive the same with `positive_beta`. A document with short windows has a smaller `longest`. Positives are
    shortened further by `subsuming` and `adjacent`, whose law is not computed.
    """
    config = task.config
    if not isinstance(config.objective, DeclutrConfig) or task.shards.manifest.content.kind != "documents":
        return  # another objective may read documents by spans of its own
    steps = -(-min(_DOCUMENTS, task.shards.num_documents) // task.plan.batch_documents)
    epochs, rows = task.plan.documents(0, steps)
    table = task.shards.take(rows)
    short_documents = task.shards.manifest.short_documents
    spans = sample_spans(config.spans, config.seed, short_documents, table, epochs)
    windows, offsets = ragged(table.column("windows"))
    rooms = windows[offsets[:-1] + 1] - windows[offsets[:-1]]
    longest = np.minimum(rooms, config.spans.max_tokens).astype(np.float64)
    shares = np.repeat(longest, spans.present.sum(axis=1))
    kinds = [("anchors", spans.anchors[spans.present], config.spans.anchor_beta)]
    if config.spans.strategy in ("all", "distant"):
        kinds.append(("positives", spans.positives[spans.present][:, 0], config.spans.positive_beta))
    for kind, bounds, beta in kinds:
        yield _compared(kind, np.diff(bounds)[:, 0], config.spans.min_tokens, shares, beta)


def _compared(kind: str, lengths: np.ndarray, shortest: int, longest: F64, beta: tuple[int, int]) -> Lengths:
    width = max(1, -(-int(longest.max() - shortest + 1) // _BINS))
    edges = np.arange(shortest, longest.max() + width + 1, width)
    # P(length < n) = P(B < (n - shortest) / (longest - shortest)), the mean over the spans' documents
    values, counts = np.unique(longest, return_counts=True)

    def below(number: np.ndarray) -> F64:
        room = np.maximum(values - shortest, 1e-9)
        each = betainc(*beta, np.clip((number[:, None] - shortest) / room, 0, 1))
        mean: F64 = each @ counts / counts.sum()
        return mean

    every = np.arange(shortest, int(longest.max()) + 2)
    found = np.searchsorted(np.sort(lengths), every) / len(lengths)
    return Lengths(
        kind,
        len(lengths),
        edges[:-1] + (width - 1) / 2,
        np.histogram(lengths, edges)[0] / len(lengths),
        np.diff(below(edges)),
        float(np.abs(found - below(every)).max()),
    )
