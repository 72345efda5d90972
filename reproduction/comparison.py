"""Paired comparison over seeds: runs that share a seed share documents, spans, masks and initial weights.

The difference of two labels of an axis is taken seed by seed, as the mean over all combinations of the other axes. Its
interval is Student's. Legend: S seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance
from typing import Any

from scipy import stats

from declutr.reproduction.item import Cell

_CONFIDENCE = 0.95

Numbers = Mapping[str, Mapping[int, float]]
"""A column's numbers by cell and seed."""


@dataclass(frozen=True)
class LabelComparison:
    """A label of an axis against another one or the start.

    Attributes:
        axis: the axis.
        label: the label.
        base: the label or start that it is compared with.
        seeds: number of seeds with all runs of both.
        difference: mean difference.
        spread: standard deviation of the S differences; None with one seed.
        unpaired: standard deviation that the difference would have if its two runs shared nothing; None if one side
            does not vary.
        interval: 95% interval of the mean difference; None with one seed.
        p: probability of such a difference if there is none (two-sided paired t-test); None if nothing varies.
    """

    axis: str
    label: str
    base: str
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
    starts = {cell.name: [cell.name] for cell in cells if not cell.labels}
    trained = [cell for cell in cells if cell.labels]
    for axis in dict.fromkeys(axis for cell in trained for axis in cell.labels):
        base, *others = labels = list(dict.fromkeys(cell.labels[axis] for cell in trained))
        sides = {label: [cell.name for cell in trained if cell.labels[axis] == label] for label in labels}
        means = {label: _by_seed(names, numbers) for label, names in (sides | starts).items()}
        own = [pair for pair in pairs if sides.keys() & {*pair}] or [(label, base) for label in others]
        wanted = [pair for pair in own if sides.keys() >= {*pair}]
        for pair in wanted + [(label, start) for start in starts for label in sides]:
            seeds = sorted(means[pair[0]].keys() & means[pair[1]].keys())
            if seeds:
                made.append(_compare(axis, *pair, *([means[one][seed] for seed in seeds] for one in pair)))
    return made


def _by_seed(names: Sequence[str], numbers: Numbers) -> dict[int, float]:
    """Mean over these cells, by seed, of the seeds that have all."""
    found = [numbers.get(name, {}) for name in names]
    return {seed: fmean(one[seed] for one in found) for seed in found[0] if all(seed in one for one in found)}


def _compare(axis: str, label: str, base: str, ours: Sequence[float], theirs: Sequence[float]) -> LabelComparison:
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    mean, count = fmean(differences), len(differences)
    if count < 2:
        return LabelComparison(axis, label, base, count, mean)
    spread, unpaired = stdev(differences), None
    if variance(ours) and variance(theirs):  # an encoder that is scored as it is has no spread to share
        unpaired = (variance(ours) + variance(theirs)) ** 0.5
    error = spread / count**0.5
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, count - 1)) if error else None
    return LabelComparison(axis, label, base, count, mean, spread, unpaired, (mean - half, mean + half), p)
