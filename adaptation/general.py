"""Losses of an adapted encoder on general sentences: STS-B, or how far their cosines moved."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

from declutr.adaptation.measures import F64
from declutr.common.bootstrap import Comparison, compare, spearman
from declutr.evaluation.encoders.protocol import unit_rows
from declutr.evaluation.encoders.transformer import TransformerEncoder
from declutr.trainer.metrics.config import STSB
from declutr.trainer.metrics.sts import FILES, read_pairs

STSB_TEST = replace(FILES[STSB], name="sts-test.csv")


def compare_stsb(before: TransformerEncoder, after: TransformerEncoder, folder: Path, seed: int) -> Comparison:
    """Spearman correlations of both encoders on STS-B's test set, and the interval of their difference over pairs.

    Raises:
        StsError: the file is missing or damaged.
    """
    return compare(stsb_values(before, folder), stsb_values(after, folder), seed, spearman)


def stsb_values(encoder: TransformerEncoder, folder: Path) -> F64:
    """`(N, 2)` cosine and judgement of each pair of STS-B's test set.

    Raises:
        StsError: the file is missing or damaged.
    """
    pairs = read_pairs(folder, STSB_TEST)
    gold = np.array([score for score, _, _ in pairs])
    first = unit_rows(encoder.encode([text for _, text, _ in pairs]).astype(np.float64))
    second = unit_rows(encoder.encode([text for _, _, text in pairs]).astype(np.float64))
    return np.stack([(first * second).sum(axis=1), gold], axis=1)


def moved(before: TransformerEncoder, after: TransformerEncoder) -> float:
    """Mean absolute change of the cosines between any two of some general sentences."""
    sentences = files(__package__).joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()
    tables = [
        rows @ rows.T for rows in (unit_rows(one.encode(sentences).astype(np.float64)) for one in (before, after))
    ]
    pairs = np.triu_indices(len(sentences), 1)
    return float(np.abs(tables[1] - tables[0])[pairs].mean())
