"""Contents of the charts of a report. `svg.py` draws them in the page, `png.py` as separate files."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["kept", "short", "dropped", "failed"]
"""Kind of documents that a bar counts; decides its colour."""


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart."""

    label: str
    value: float
    role: Role
    shown: str


@dataclass(frozen=True)
class Bars:
    """A bar chart: one bar a row, in this order."""

    name: str
    """File name without suffix."""
    title: str
    bars: list[Bar]


@dataclass(frozen=True)
class Series:
    """One of the stacked series of a histogram."""

    role: Role
    label: str
    counts: NDArray[np.int64]
    """`(num_bins,)`"""


@dataclass(frozen=True)
class ReferenceLine:
    """A vertical line at a value."""

    value: float
    label: str


@dataclass(frozen=True)
class Histogram:
    """Stacked counts over bins of a logarithmic axis."""

    name: str
    title: str
    axis: str
    """Name of the quantity on the axis."""
    edges: NDArray[np.float64]
    """`(num_bins + 1,)`, ascending, positive."""
    series: list[Series]
    marks: list[ReferenceLine] = field(default_factory=list)

    def trimmed(self) -> "Histogram":
        """Copy without the empty bins at both ends. Every mark stays inside."""
        total = self.totals()
        used = np.flatnonzero(total).tolist()
        for mark in self.marks:
            used.append(int(np.clip(np.searchsorted(self.edges, mark.value) - 1, 0, len(total) - 1)))
        first, last = min(used), max(used) + 1
        cut = [Series(one.role, one.label, one.counts[first:last]) for one in self.series]
        return Histogram(self.name, self.title, self.axis, self.edges[first : last + 1], cut, self.marks)

    def totals(self) -> NDArray[np.int64]:
        """Height of each stack."""
        total: NDArray[np.int64] = np.sum([one.counts for one in self.series], axis=0)
        return total

    def place(self, value: float) -> float:
        """Position of a value on the axis: 0 at its left end, 1 at its right end."""
        low, high = np.log(self.edges[0]), np.log(self.edges[-1])
        return float((np.log(value) - low) / (high - low))

    def axis_ticks(self) -> list[int]:
        """Round values on the axis: powers of ten, with 2 and 5 times those where they are few."""
        powers = range(13)
        fine = [step * 10**power for power in powers for step in (1, 2, 5)]
        inside = [tick for tick in fine if self.edges[0] <= tick <= self.edges[-1]]
        return inside if len(inside) <= 9 else [tick for tick in inside if str(tick).strip("0") == "1"]


def count_ticks(largest: int) -> list[int]:
    """About four round values from 0 up to at least the largest count."""
    step = 1
    while largest > 4 * step:
        step = {1: 2, 2: 5, 5: 10}[int(str(step)[0])] * 10 ** (len(str(step)) - 1)
    return [step * number for number in range(-(-max(largest, 1) // step) + 1)]


def short_number(value: int) -> str:
    """A count for an axis: 20k, 3M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size and value % (size // 10) == 0:
            return f"{value / size:g}{letter}"
    return f"{value:,}"
