"""Line charts as inline SVG: curves over steps, and paths in a plane.

Curves are drawn in a box that is stretched to the width of the page; text around it keeps its size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from declutr.evaluation.report.markup import Html, tag
from declutr.inspection.runs.record import F64

_HEIGHT, _HEAD, _FOOT = 150, 10, 44
_BOX = 1000
_MOST_POINTS = 240
_TICKS = 4


@dataclass(frozen=True)
class Curve:
    """Points of one run, in their order.

    Attributes:
        label: name of the run.
        colour: number of its colour.
        x: `(n,)` places, finite.
        y: `(n,)` values, finite.
        law: draw it dashed and without points.
    """

    label: str
    colour: int
    x: F64
    y: F64
    law: bool = False

    @property
    def told(self) -> str:
        """The first, last, lowest and highest value, in words."""
        first, last, low, high = (short(float(v)) for v in (self.y[0], self.y[-1], self.y.min(), self.y.max()))
        return f"{self.label}: first {first}, last {last}, lowest {low}, highest {high}"


@dataclass(frozen=True)
class Chart:
    """A chart of some curves.

    Attributes:
        name: unique id on the page.
        title: name of the quantity.
        axis: name of the horizontal axis.
        curves: those of all runs.
        path: join the points of a curve in their order and mark them, instead of averaging over steps.
        marks: places on the horizontal axis and what they are, `alarm`.
    """

    name: str
    title: str
    axis: str
    curves: Sequence[Curve]
    path: bool = False
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)

    def draw(self) -> Html:
        """The chart as a figure, with a title and its figures for readers without sight."""
        shown = [curve for curve in self.curves if len(curve.x)]
        x_low, x_high = _range([curve.x for curve in shown])
        y_low, y_high = _range([curve.y for curve in shown])
        y_ticks, x_ticks = ticks(y_low, y_high), ticks(x_low, x_high)
        y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
        base = _HEAD + _HEIGHT
        parts = [
            tag("title", self.title, id=f"{self.name}-title"),
            tag("desc", "; ".join(curve.told for curve in shown), id=f"{self.name}-desc"),
        ]
        for value in y_ticks:
            y = f"{base - _HEIGHT * (value - y_low) / (y_high - y_low):.1f}"
            parts.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
            parts.append(tag("text", short(value), x="-8", y=y, dy="0.32em", class_="tick end"))
        for value in x_ticks:
            x = f"{100 * (value - x_low) / (x_high - x_low):.2f}%"
            parts.append(tag("line", x1=x, x2=x, y1=f"{base}", y2=f"{base + 4}", class_="axis"))
            parts.append(tag("text", short(value), x=x, y=f"{base + 18}", class_="tick middle"))
        parts.append(tag("line", x1="0", x2="100%", y1=f"{base}", y2=f"{base}", class_="axis"))
        parts.append(tag("text", self.axis, x="50%", y=f"{base + 36}", class_="tick middle"))

        def placed(x: F64, y: F64) -> str:
            across, up = _BOX * (x - x_low) / (x_high - x_low), _BOX * (y_high - y) / (y_high - y_low)
            return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across.tolist(), up.tolist(), strict=True))

        drawn = [
            tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1="0", y2=f"{_BOX}", class_=kind)
            for x, kind in ((_BOX * (mark - x_low) / (x_high - x_low), kind) for mark, kind in self.marks)
            if 0 <= x <= _BOX
        ]
        for curve in shown:
            colour = f"s{curve.colour}"
            if self.path or curve.law:
                kind = "line law" if curve.law else "line"
                drawn.append(_line(placed(curve.x, curve.y), f"{kind} {colour}", curve.told))
                continue
            middle, mean, low, high = _averaged(curve.x, curve.y)
            if len(middle) < len(curve.x):
                both = f"{placed(middle, low)} {placed(middle[::-1], high[::-1])}"
                drawn.append(tag("polygon", points=both, class_=f"band {colour}"))
            drawn.append(_line(placed(middle, mean), f"line {colour}", curve.told))
        box = {"viewBox": f"0 0 {_BOX} {_BOX}", "preserveAspectRatio": "none", "class_": "box"}
        parts.append(tag("svg", *drawn, x="0", y=f"{_HEAD}", width="100%", height=f"{_HEIGHT}", **box))
        if self.path:
            parts += [mark for curve in shown for mark in self._ends(curve, (x_low, x_high), (y_low, y_high))]
        labelled = f"{self.name}-title {self.name}-desc"
        svg = tag("svg", *parts, role="img", aria_labelledby=labelled, class_="histogram", height=f"{base + _FOOT}")
        return tag("figure", tag("figcaption", self.title), svg)

    def _ends(self, curve: Curve, across: tuple[float, float], up: tuple[float, float]) -> list[Html]:
        """A small point at each place of a path and a large one at its end."""
        sizes = np.full(len(curve.x), 2.0)
        sizes[-1] = 4.5
        return [
            tag(
                "circle",
                cx=f"{100 * (x - across[0]) / (across[1] - across[0]):.2f}%",
                cy=f"{_HEAD + _HEIGHT * (up[1] - y) / (up[1] - up[0]):.1f}",
                r=f"{size}",
                class_=f"point s{curve.colour}",
            )
            for x, y, size in zip(curve.x.tolist(), curve.y.tolist(), sizes.tolist(), strict=True)
        ]


def _line(points: str, kind: str, told: str) -> Html:
    if points.count(",") == 1:  # a single point would be invisible
        points = f"{points} {points}"
    return tag("polyline", tag("title", told), points=points, class_=kind)


def _averaged(x: F64, y: F64) -> tuple[F64, F64, F64, F64]:
    """At most `_MOST_POINTS` places with the mean, lowest and highest value of equally many points each."""
    bounds = np.unique(np.linspace(0, len(x), min(len(x), _MOST_POINTS) + 1).astype(np.int64))[:-1]
    counts = np.diff([*bounds.tolist(), len(x)])
    mean_x, mean_y = (np.add.reduceat(values, bounds) / counts for values in (x, y))
    return mean_x, mean_y, np.minimum.reduceat(y, bounds), np.maximum.reduceat(y, bounds)


def _range(parts: Sequence[F64]) -> tuple[float, float]:
    """Lowest and highest of all values, a little apart if they are equal."""
    low, high = (float(pick(np.concatenate(parts))) for pick in (np.min, np.max))
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    apart = 0.5 * abs(low) or 0.5
    return low - apart, high + apart


def ticks(low: float, high: float) -> list[float]:
    """A few round values from at most `low` to at least `high`, or from inside if these would be far away."""
    step = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= _TICKS + 0.5)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters: 0.0012, 3.14, 12k, 3M, 1e-08."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}" if abs(value) >= 1e-4 or not value else f"{value:.1e}"
