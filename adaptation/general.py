"""What an adapted encoder lost in general: STS-B, or how far cosines of general sentences moved."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from adaptation.measures import F64
from common.bootstrap import Comparison, compare, spearman
from evaluation.encoders.transformer import TransformerEncoder
from trainer.metrics.sts import read_pairs

STSB_TEST = "sts-test.csv"


def compare_stsb(before: TransformerEncoder, after: TransformerEncoder, folder: Path, seed: int) -> Comparison:
    """Spearman correlations of both encoders on STS-B's test set, and the interval of their difference over pairs.

    Raises:
        StsError: the file is missing or damaged.
    """
    return compare(_cosines_and_gold(before, folder), _cosines_and_gold(after, folder), seed, spearman)


def _cosines_and_gold(encoder: TransformerEncoder, folder: Path) -> F64:
    """`(N, 2)` cosine and judgement of each pair."""
    pairs = read_pairs(folder, STSB_TEST)
    gold = np.array([score for score, _, _ in pairs])
    first = _unit(encoder.encode([text for _, text, _ in pairs]))
    second = _unit(encoder.encode([text for _, _, text in pairs]))
    return np.stack([(first * second).sum(axis=1), gold], axis=1)


def moved(before: TransformerEncoder, after: TransformerEncoder) -> float:
    """Mean absolute change of the cosines between any two of some general sentences."""
    sentences = files("adaptation").joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()
    tables = [rows @ rows.T for rows in (_unit(one.encode(sentences)) for one in (before, after))]
    pairs = np.triu_indices(len(sentences), 1)
    return float(np.abs(tables[1] - tables[0])[pairs].mean())


def _unit(rows: np.ndarray) -> F64:
    rows = rows.astype(np.float64)
    unit: F64 = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
