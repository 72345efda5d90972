"""Choice of a candidate on development documents, and the verdict on test documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from declutr.adaptation.scores import STATISTICS, Values
from declutr.common.bootstrap import MIN_ROWS, Comparison, compare

Outcome = Literal["better", "no measurable difference", "worse", "too few documents to tell"]
_POINT = 0.01


def choose(order: Sequence[str], development: dict[str, Values], primary: str, seed: int) -> str:
    """The cheapest candidate that no dearer one exceeds on development rows with an interval above 0.

    Args:
        order: candidates from the cheapest to the dearest.
        development: their values.
        primary: the measure that decides.
        seed: of the intervals.
    """
    for place, name in enumerate(order):
        found = [
            compare(development[name][primary], development[other][primary], seed, STATISTICS[primary])
            for other in order[place + 1 :]
        ]
        if not any(one.interval is not None and one.interval[0] > 0 for one in found):
            return name
    raise ValueError("there is no candidate")


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate is better than the start on test rows.

    Attributes:
        outcome: the verdict.
        comparison: start and candidate by the primary measure.
    """

    outcome: Outcome
    comparison: Comparison

    @property
    def rows_needed(self) -> int | None:
        """Rows with which a difference of one point would be measurable, N (half width / 1 point)^2; None: unknown."""
        interval = self.comparison.interval
        if interval is None:
            return None
        return round(self.comparison.rows * ((interval[1] - interval[0]) / 2 / _POINT) ** 2)

    def sentence(self, rows: str) -> str:
        """The verdict with its figures.

        Args:
            rows: what the rows are, such as documents.
        """
        one = self.comparison
        if one.interval is None:
            return f"{self.outcome}: {one.rows} test {rows}, an interval needs at least {MIN_ROWS}"
        low, high = (100 * end for end in one.interval)
        told = (
            f"{self.outcome}: {100 * one.before:.1f} before, {100 * one.after:.1f} after, difference "
            f"{100 * one.difference:+.1f} points (95% interval {low:+.1f} to {high:+.1f}, {one.rows:,} test {rows})"
        )
        if self.outcome == "no measurable difference":
            told += f"; a difference of one point would need about {self.rows_needed:,} test {rows}"
        return told


def judge(before: Values, after: Values, primary: str, seed: int) -> Verdict:
    """The verdict on a candidate against the start, by the primary measure."""
    one = compare(before[primary], after[primary], seed, STATISTICS[primary])
    if one.interval is None:
        return Verdict("too few documents to tell", one)
    low, high = one.interval
    return Verdict("better" if low > 0 else "worse" if high < 0 else "no measurable difference", one)
