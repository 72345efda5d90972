"""Paired bootstrap: does a second encoder score higher than a first one on the same rows, or is it chance?

Both are scored on the same rows (documents, pairs), and rows are drawn with replacement, each with its two values
(Efron and Tibshirani 1993). The draws are keyed, so that the same values give the same interval everywhere.
Legend: N rows, K values a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding

F64 = NDArray[np.float64]
Statistic = Callable[[F64], float]

MIN_ROWS = 100  # with fewer rows there is no interval: its ends would depend on a few rows
MIN_CHANGED = 6
"""With fewer rows that differ, a mean is not measurably higher. If chance gives each difference its sign, n of one sign
have the probability 2 * 0.5^n, and 6 are the first below 5% (0.03); the bootstrap excludes 0 from 4 on (0.13)."""
_CONFIDENCE = 0.95
_RESAMPLES = 2000
_DRAWS = 50  # made at once
_CACHED_ROWS = 2_000  # most rows whose draws stay in memory, 32 MB


def mean(values: F64) -> float:
    """The mean of `(N,)` values."""
    return float(values.mean())


def share(values: F64) -> float:
    """Sum of the first column of `(N, 2)` by that of the second: the mean over members of N groups of unlike sizes."""
    return float(values[:, 0].sum() / values[:, 1].sum()) if values[:, 1].any() else float("nan")


def grouped(values: F64, groups: NDArray[np.int64]) -> F64:
    """`(G, 2)` sums and counts of `(N,)` values by group below G, for `share`: groups, independent, are drawn whole."""
    return np.stack([np.bincount(groups, values), np.bincount(groups)], axis=1).astype(np.float64)


def spearman(values: F64) -> float:
    """Spearman correlation of the two columns of `(N, 2)`, ties averaged; 0 if a column is constant."""
    first, second = (_ranks(column) for column in values.T)
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else 0.0


def _ranks(values: F64) -> F64:
    """Ranks of `(N,)` values around 0; equal values have the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[group] - (len(values) - 1) / 2


def item_errors(influence: F64) -> F64:
    """`(N,)` shares of test items in a score's error, in percent: the root of their squared sum is its standard error.

    Those of two encoders on the same items may be subtracted, and averaged over runs, item by item. `influence` is the
    `(N,)` first-order effect of each item on the score, up to a constant.
    """
    count = len(influence)
    return 100 * (influence - influence.mean()) / np.sqrt(count * max(count - 1, 1))


def spearman_influence(values: F64) -> F64:
    """`(N,)` influence of each row of `(N, 2)` on their Spearman correlation (Croux and Dehon 2010, ties averaged)."""
    first, second = (_ranks(column) / len(values) for column in values.T)
    scale = first.std() * second.std()
    moved = _mean_above(values[:, 0], second) + _mean_above(values[:, 1], first)
    return (first * second + moved) / scale if scale else np.zeros(len(values))


def _mean_above(values: F64, weights: F64) -> F64:
    """Sum of the weights of rows with larger values, of equal ones half, over N: `(N,)`."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    sums = np.bincount(group, weights, len(counts))
    return (np.cumsum(sums[::-1])[::-1] - sums / 2)[group] / len(values)


@dataclass(frozen=True)
class Comparison:
    """Scores of two encoders on the same rows."""

    before: float  # score of the first encoder; NaN without rows
    after: float  # score of the second encoder; NaN without rows
    rows: int  # number of rows with both values
    interval: tuple[float, float] | None  # 95% interval of the difference; None with too few rows
    changed: int | None = None  # number of rows whose two values differ, if the score is their mean or share

    @property
    def difference(self) -> float:
        """Score of the second encoder minus that of the first."""
        return self.after - self.before

    @property
    def measurable(self) -> bool:
        """True if the interval does not contain 0, and enough rows differ."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1] and not self.few_changed

    @property
    def few_changed(self) -> bool:
        """True if the score is a mean and fewer than `MIN_CHANGED` rows differ."""
        return self.changed is not None and self.changed < MIN_CHANGED

    def sentence(self, rows: str = "rows") -> str:
        """The difference with its interval, the number of rows and a judgement: better, worse, or not measurable."""
        if self.rows == 0:
            return f"not comparable: none of the {rows} have both values"
        if self.interval is None:
            return f"{self.difference:+.4f} ({self.rows} {rows}: no interval, which needs at least {MIN_ROWS})"
        low, high = self.interval
        text = f"{self.difference:+.4f} (95% interval {low:+.4f} to {high:+.4f}, {self.rows} {rows})"
        judged = "no measurable difference" if not self.measurable else "better" if self.difference > 0 else "worse"
        few = f", {self.changed} {rows} differ and it needs {MIN_CHANGED}" if self.few_changed else ""
        return f"{text}: {judged}{few}"


def compare(before: F64, after: F64, seed: int, statistic: Statistic = mean, min_rows: int = MIN_ROWS) -> Comparison:
    """Compares two encoders by their `(N,)` or `(N, K)` values on the same rows, in the same order.

    A row with a value that is missing (NaN) on either side is left out on both. A difference of means is not measurable
    if fewer than `MIN_CHANGED` rows differ, whatever the interval. With fewer than `min_rows` there is no interval.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape:
        raise ValueError(f"values of {before.shape} and {after.shape} are not of the same rows")
    missing = np.isnan(before + after)
    present = ~(missing.any(axis=1) if missing.ndim > 1 else missing)
    before, after = before[present], after[present]
    if not len(before):
        return Comparison(np.nan, np.nan, 0, None)
    interval = paired_interval(before, after, seed, statistic=statistic) if len(before) >= min_rows else None
    differ = before != after
    changed = int((differ.any(axis=1) if differ.ndim > 1 else differ).sum()) if statistic in (mean, share) else None
    return Comparison(statistic(before), statistic(after), len(before), interval, changed)


def paired_interval(before: F64, after: F64, seed: int, statistic: Statistic = mean) -> tuple[float, float]:
    """The 95% percentile interval of `statistic(after) - statistic(before)` of `(N,)` or `(N, K)` values, none NaN."""
    differences = []
    for first in range(0, _RESAMPLES, _DRAWS):
        drawn = (_drawn_once if len(before) <= _CACHED_ROWS else _drawn)(seed, len(before), first)
        if statistic is mean:  # the same bits as row by row, a hundred times as fast
            differences += list(after[drawn].mean(axis=1) - before[drawn].mean(axis=1))
        elif statistic is share:
            sums = [values[:, column][drawn].sum(axis=1) for values in (after, before) for column in (0, 1)]
            differences += list(sums[0] / sums[1] - sums[2] / sums[3])
        else:
            differences += [statistic(after[rows]) - statistic(before[rows]) for rows in drawn]
    low, high = np.quantile(differences, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)


def _drawn(seed: int, count: int, first: int) -> NDArray[np.int64]:
    """`(50, count)` numbers of rows of the draws from this one on."""
    draws = np.arange(first, min(first + _DRAWS, _RESAMPLES), dtype=np.uint64)
    # a draw is a position: the same in blocks of any size
    words = seeding.words(seed, "paired bootstrap", draws, np.zeros_like(draws), count)
    return (seeding.unit(words) * count).astype(np.int64)


_drawn_once = lru_cache(2 * _RESAMPLES // _DRAWS)(_drawn)  # several candidates are compared on the same rows
