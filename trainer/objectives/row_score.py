"""Scores of held-out rows, of which one half chooses a checkpoint and the other reports it (decision 31).

Legend: N held-out rows.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.bootstrap import F64, Statistic, mean, spearman

REPORTED = "reported_"
"""Before the name of a score: its value on the rows that choose nothing."""


class RowScore(float):
    """A score with the values of the rows that it is made of.

    Attributes:
        keys: `(N,)` keys of the rows.
        values: `(N,)` values whose mean is the score, or `(N, 2)` whose Spearman correlation is, in percent.
    """

    keys: seeding.U64
    values: F64

    def __new__(cls, keys: seeding.U64, values: F64) -> "RowScore":
        """The score of all rows; NaN without any."""
        score = super().__new__(cls, statistic_of(values)(values) if len(values) else float("nan"))
        score.keys, score.values = keys, values
        return score

    def __reduce__(self) -> tuple[type["RowScore"], tuple[seeding.U64, F64]]:  # a float would keep its number alone
        return RowScore, (self.keys, self.values)

    def of_half(self, seed: int, choosing: bool) -> "RowScore":
        """The score of the rows that choose, or of those that report."""
        mask = choosing_rows(seed, self.keys) == choosing
        return RowScore(self.keys[mask], self.values[mask])


def statistic_of(values: F64) -> Statistic:
    """The score of such values: their mean, or for two columns the Spearman correlation in percent."""
    return mean if values.ndim == 1 else _percent


def _percent(values: F64) -> float:
    return 100 * spearman(values)


def choosing_rows(seed: int, keys: seeding.U64) -> NDArray[np.bool_]:
    """`(N,)` true for the half that chooses: those with the smaller draws, which depend on seed and key alone."""
    drawn = seeding.words(seed, "choosing half", keys, np.zeros_like(keys), 1)[:, 0]
    chosen = np.zeros(len(keys), np.bool_)
    chosen[np.argsort(drawn, kind="stable")[: (len(keys) + 1) // 2]] = True
    return chosen


def divide(all_scores: Mapping[str, float], seed: int, score: str) -> tuple[dict[str, float], str, F64]:
    """Divides the scores of a validation into what chooses and what reports.

    Args:
        all_scores: scores by name, of all rows.
        seed: the run's seed.
        score: `validation.score`.

    Returns:
        Scores by name: those of rows by their choosing half, and that of `score` also by its reporting half; the name
        of the score that is reported, the first one of rows if `score` is not of rows, or "" without any; and the
        values of its reporting rows.
    """
    of_rows = {name: value for name, value in all_scores.items() if isinstance(value, RowScore)}
    scores = {**all_scores, **{name: float(value.of_half(seed, choosing=True)) for name, value in of_rows.items()}}
    if not of_rows:
        return scores, "", np.empty(0)
    name = score if score in of_rows else next(iter(of_rows))
    reporting = of_rows[name].of_half(seed, choosing=False)
    return {**scores, REPORTED + name: float(reporting)}, name, reporting.values
