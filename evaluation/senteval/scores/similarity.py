"""Semantic textual similarity: cosine of two embeddings against human scores.

Legend: R pairs, N embeddings, D their size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from declutr.evaluation.senteval.data.taskdata import Split, TaskData

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """Correlations of R cosines with R gold scores."""

    pearson: float
    """Within -1..1; 0 if undefined."""
    spearman: float
    """Within -1..1, ties averaged; 0 if undefined."""
    num_pairs: int
    """R."""
    undefined: bool = False
    """All cosines, or all gold scores, are equal, because the encoder or the data have collapsed."""


@dataclass(frozen=True)
class StsScore:
    """Correlations of the subsets and the three ways in which papers aggregate them."""

    subsets: Mapping[str, Correlation]
    """Correlations by subset name."""
    mean: Correlation
    """Unweighted means (DeCLUTR's tables)."""
    wmean: Correlation
    """Means weighted by numbers of pairs (SCL's tables)."""
    all: Correlation
    """One correlation over all pairs of all subsets (tables of SimCSE and its followers)."""

    def flat(self) -> dict[str, float]:
        """Scores by name, as a result stores them: `spearman.mean`, `pearson.all`, `spearman.MSRpar`..."""
        parts = {"mean": self.mean, "wmean": self.wmean, "all": self.all, **self.subsets}
        return {
            f"{kind}.{name}": getattr(part, kind) for kind in ("spearman", "pearson") for name, part in parts.items()
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to show next to the score."""
        flat = [name for name, part in self.subsets.items() if part.undefined]
        return (f"no correlation in {', '.join(flat)} (all cosines are equal); counted as 0",) if flat else ()


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Vector:
    """Cosines `(R,)` of rows of two `(R, D)` arrays; 0 for a pair with a zero vector, and for NaN.

    The arithmetic equals SentEval's to the last bit, pair by pair in the type of the embeddings. Mathematically equal
    cosines differ by rounding, and ranks follow: another order of the same sums moves a Spearman by up to 0.13 points
    (hashed words on STS12, float64 instead of float32).
    """
    one, two = np.nan_to_num(first), np.nan_to_num(second)
    with np.errstate(all="ignore"):  # a zero vector divides by zero; `nan_to_num` makes it 0
        pairs = zip(one, two, strict=True)
        values = [np.dot(u, v) / (np.linalg.norm(u) * np.linalg.norm(v)) for u, v in pairs]
    result: Vector = np.nan_to_num(np.array(values)).astype(np.float64)
    return result


def correlate(predicted: Vector, gold: Vector) -> Correlation:
    """Pearson and Spearman of `(R,)` values with `(R,)` gold scores.

    Raises:
        ValueError: fewer than two pairs, or unequal lengths.
    """
    if len(predicted) != len(gold) or len(gold) < 2:
        raise ValueError(f"{len(predicted)} values and {len(gold)} gold scores: no correlation")
    if np.ptp(predicted) == 0 or np.ptp(gold) == 0:
        return Correlation(0.0, 0.0, len(gold), undefined=True)
    return Correlation(
        float(pearsonr(predicted, gold).statistic), float(spearmanr(predicted, gold).statistic), len(gold)
    )


def aggregate(subsets: Mapping[str, tuple[Vector, Vector]]) -> StsScore:
    """Aggregate `(cosines, gold)` of each subset."""
    parts = {name: correlate(*pair) for name, pair in subsets.items()}
    weights = np.array([part.num_pairs for part in parts.values()], dtype=np.float64)
    together = correlate(*(np.concatenate(side) for side in zip(*subsets.values(), strict=True)))
    undefined = any(part.undefined for part in parts.values())

    def mean(weighted: bool) -> Correlation:
        values = np.array([(part.pearson, part.spearman) for part in parts.values()])
        pearson, spearman = np.average(values, axis=0, weights=weights if weighted else None)
        return Correlation(float(pearson), float(spearman), int(weights.sum()), undefined)

    return StsScore(parts, mean(weighted=False), mean(weighted=True), together)


def score_sts(data: TaskData, rows: Mapping[str, int], embeddings: NDArray[np.floating]) -> StsScore:
    """Scores of an STS task; the subsets of SICK-R, and of STS-B in any language, are its dev and its test split.

    `rows` has the row of each sentence in the `(N, D)` embeddings.
    """
    splits = {name: split for name, split in data.splits.items() if name != "train"}
    return aggregate({name: (_pair_cosines(split, rows, embeddings), gold(split)) for name, split in splits.items()})


def _pair_cosines(split: Split, rows: Mapping[str, int], embeddings: NDArray[np.floating]) -> Vector:
    if split.second is None:
        raise ValueError("rows without a second sentence have no cosine")
    first, second = ([rows[text] for text in side] for side in (split.first, split.second))
    return cosines(embeddings[first], embeddings[second])


def gold(split: Split) -> Vector:
    """Gold scores `(R,)`."""
    return split.labels.astype(np.float64)
