"""Scores of an encoder on STS-B's test set, and some general sentences."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.encoders.protocol import SentenceEncoder, unit_rows
from declutr.trainer.metrics.config import STSB
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs

STSB_TEST = replace(FILES[STSB], name="sts-test.csv")


def stsb_values(encoder: SentenceEncoder, folder: Path) -> NDArray[np.float64]:
    """`(N, 2)` cosine and judgement of each pair of STS-B's test set.

    Raises:
        DataError: the file is missing or damaged.
    """
    pairs = read_pairs(folder, STSB_TEST)
    gold = np.array([score for score, _, _ in pairs])
    first = unit_rows(encoder.encode([text for _, text, _ in pairs]).astype(np.float64))
    second = unit_rows(encoder.encode([text for _, _, text in pairs]).astype(np.float64))
    return np.stack([(first * second).sum(axis=1), gold], axis=1)


def general_sentences() -> list[str]:
    """Sixty sentences, two on each subject."""
    return files(__package__).joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()
