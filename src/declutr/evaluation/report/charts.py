"""Contents of the charts of a report, and their drawing in the page as SVG; `png.py` draws them as separate files.

Colours come from the page's style sheet by class, and so follow its light and dark schemes. matplotlib's SVG would not:
its style attributes are what the page's policy forbids.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.report.markup import Html, join, tag

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


_HEIGHT = 220
_HEAD = 44
"""Pixels above the bars, for the labels of the marks."""
_FOOT = 46


def draw_histogram(chart: Histogram) -> Html:
    """Draws the histogram with a title, a description and a tooltip for each bin. The counts are in a table below."""
    ticks = count_ticks(int(chart.totals().max()))
    scale = _HEIGHT / ticks[-1]
    base = _HEAD + _HEIGHT
    parts = [tag("title", chart.title, id=f"{chart.name}-title"), tag("desc", _told(chart), id=f"{chart.name}-desc")]
    for tick in ticks:
        level = _px(base - tick * scale)
        parts.append(tag("line", x1="0", x2="100%", y1=level, y2=level, class_="grid"))
        parts.append(tag("text", short_number(tick), x="-8", y=level, dy="0.32em", class_="tick end"))
    for tick in chart.axis_ticks():
        x = _percent(chart.place(tick))
        parts.append(tag("line", x1=x, x2=x, y1=_px(base), y2=_px(base + 5), class_="axis"))
        parts.append(tag("text", short_number(tick), x=x, y=_px(base + 20), class_="tick middle"))
    parts.append(tag("text", chart.axis, x="50%", y=_px(base + 40), class_="tick middle"))
    parts += _bins(chart, scale, base)
    parts.append(tag("line", x1="0", x2="100%", y1=_px(base), y2=_px(base), class_="axis"))
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: -mark.value)):
        place = chart.place(mark.value)
        y = 14 + 18 * number
        before = place > 0.4
        x = _percent(place)
        parts.append(tag("line", x1=x, x2=x, y1=_px(y - 10), y2=_px(base), class_="mark"))
        side = {"dx": "-6" if before else "6", "class_": f"tick {'end' if before else 'start'} strong"}
        parts.append(tag("text", mark.label, x=x, y=_px(y), **side))
    labelled = f"{chart.name}-title {chart.name}-desc"
    return tag("svg", *parts, role="img", aria_labelledby=labelled, class_="histogram", height=str(base + _FOOT))


def _bins(chart: Histogram, scale: float, base: int) -> list[Html]:
    """One group for each bin, with its series stacked."""
    groups = []
    for index in range(len(chart.edges) - 1):
        left, right = chart.place(chart.edges[index]), chart.place(chart.edges[index + 1])
        told = [f"{one.counts[index]:,} {one.label}" for one in chart.series if one.counts[index]]
        if not told:
            continue
        low, high = chart.edges[index], chart.edges[index + 1]
        rects = [tag("title", f"{low:,.0f} to {high:,.0f} {chart.axis.split()[0]}: {', '.join(told)}")]
        top = float(base)
        for one in chart.series:
            height = float(one.counts[index]) * scale
            if height:
                top -= height
                # A document in ten thousand would be less than a pixel high, and gone.
                drawn = max(height, 1.0)
                place = {"x": _percent(left), "width": _percent((right - left) * 0.92)}
                rects.append(tag("rect", y=_px(top + height - drawn), height=_px(drawn), class_=one.role, **place))
        groups.append(tag("g", *rects))
    return groups


def draw_bar(part: float, whole: float, role: str) -> Html:
    """Draws the bar of a table row. It repeats a number of the row, so screen readers skip it."""
    width = _percent(part / whole if whole else 0)
    rects = join(
        tag("rect", x="0", y="0", width="100%", height="6", rx="3", class_="track"),
        tag("rect", x="0", y="0", width=width, height="6", rx="3", class_=role),
    )
    return tag("svg", rects, class_="bar", height="6", aria_hidden="true")


def _told(chart: Histogram) -> str:
    sums = ", ".join(f"{int(one.counts.sum()):,} {one.label}" for one in chart.series)
    marks = "; ".join(f"line at {mark.label}" for mark in chart.marks)
    return f"Histogram of {chart.axis}: {sums}. {marks}. The figures are in the table below."


def _percent(part: float) -> str:
    return f"{100 * part:.3f}%"


def _px(value: float) -> str:
    return f"{value:.2f}"
