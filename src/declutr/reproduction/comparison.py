"""Paired comparison over seeds: runs that share a seed share documents, spans, masks and initial weights.

The difference of two labels of an axis is taken seed by seed, as the mean over the combinations of the other axes'
labels that both have. With two axes it is also taken within each label of the other one. Its interval is Student's.
Legend: S seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance
from typing import Any

from scipy import stats

from declutr.reproduction.item import Cell

_CONFIDENCE = 0.95
_ROUNDING = 1e-9  # of numbers in percent, as a share of their difference if it is above 1

Numbers = Mapping[str, Mapping[int, float]]
"""A column's numbers by cell and seed."""


@dataclass(frozen=True)
class LabelComparison:
    """A label of an axis against another one or the start.

    Attributes:
        axis: the axis.
        label: the label.
        base: the label or start that it is compared with.
        within: label of the other axis; "" for the mean over all.
        seeds: number of seeds with all runs of both.
        difference: mean difference.
        spread: standard deviation of the S differences; None with one seed.
        unpaired: standard deviation that the difference would have if its two runs shared nothing; None if one side
            does not vary.
        interval: 95% interval of the mean difference; None with one seed, or if nothing varies but by rounding.
        p: probability of such a difference if there is none (two-sided paired t-test); None where the interval is.
    """

    axis: str
    label: str
    base: str
    within: str
    seeds: int
    difference: float
    spread: float | None = None
    unpaired: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None

    @property
    def measurable(self) -> bool:
        """True if the interval does not contain 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def pairing(self) -> float | None:
        """Paired spread as a share of the unpaired one."""
        return self.spread / self.unpaired if self.unpaired and self.spread is not None else None

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {**asdict(self), "measurable": self.measurable, "pairing": self.pairing}


def compare_labels(
    cells: Sequence[Cell], numbers: Numbers, pairs: Sequence[tuple[str, str]] = ()
) -> list[LabelComparison]:
    """Each label of each axis against the first label of its axis, or the axis' pairs, and then against the start.

    Those without a common seed are left out.

    Args:
        cells: the cells; the start has no labels.
        numbers: the column's numbers of finished runs.
        pairs: labels to compare, the first one against the second, in place of an axis' others against its first.
    """
    made = []
    starts = [cell.name for cell in cells if not cell.labels]
    trained = [cell for cell in cells if cell.labels]
    axes = list(dict.fromkeys(axis for cell in trained for axis in cell.labels))
    for axis in axes:
        base, *others = labels = list(dict.fromkeys(cell.labels[axis] for cell in trained))
        own = [pair for pair in pairs if {*labels} & {*pair}] or [(label, base) for label in others]
        wanted = [pair for pair in own if {*labels} >= {*pair}] + [
            (label, start) for start in starts for label in labels
        ]
        (other,) = {*axes} - {axis} if len(axes) == 2 else ("",)
        insides = list(dict.fromkeys(cell.labels[other] for cell in trained if other))
        for within in ["", *(insides if len(insides) > 1 else [])]:
            taken = [cell for cell in trained if within in ("", cell.labels.get(other))]
            sides = {label: _by_rest(taken, axis, label) for label in labels}
            for label, against in wanted:
                ours, theirs = sides[label], sides.get(against)
                shared = [rest for rest in ours if theirs is None or rest in theirs]
                one = _by_seed([ours[rest] for rest in shared], numbers)
                two = _by_seed([against] if theirs is None else [theirs[rest] for rest in shared], numbers)
                if seeds := sorted(one.keys() & two.keys()):
                    values = ([side[seed] for seed in seeds] for side in (one, two))
                    made.append(_compare((axis, label, against, within), *values))
    return made


def _by_rest(cells: Sequence[Cell], axis: str, label: str) -> dict[tuple[str, ...], str]:
    """Names of the cells with a label, by their labels on the other axes."""
    return {
        tuple(one for name, one in cell.labels.items() if name != axis): cell.name
        for cell in cells
        if cell.labels[axis] == label
    }


def _by_seed(names: Sequence[str], numbers: Numbers) -> dict[int, float]:
    """Mean over these cells, by seed, of the seeds that have all."""
    found = [numbers.get(name, {}) for name in names]
    seeds = found[0] if found else {}
    return {seed: fmean(one[seed] for one in found) for seed in seeds if all(seed in one for one in found)}


def _compare(sides: tuple[str, str, str, str], ours: Sequence[float], theirs: Sequence[float]) -> LabelComparison:
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return LabelComparison(*sides, count, mean)
    spread, unpaired = stdev(differences), None
    if variance(ours) and variance(theirs):  # an encoder that is scored as it is has no spread to share
        unpaired = (variance(ours) + variance(theirs)) ** 0.5
    if spread <= _ROUNDING * max(1.0, abs(mean)):
        return LabelComparison(*sides, count, mean, spread, unpaired)
    error = spread / count**0.5
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, count - 1))
    return LabelComparison(*sides, count, mean, spread, unpaired, (mean - half, mean + half), p)
