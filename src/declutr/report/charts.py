"""Charts by matplotlib, as SVG that stands inside a page.

The page's policy forbids matplotlib's style attributes, so they become attributes of their own, and its colours become
the page's, which follow the reader's light or dark scheme. No text of a corpus or a run is drawn: titles, names and
legends are in the page, which escapes them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from declutr.report.page import STYLE, Role

F64 = NDArray[np.float64]
COLOURS = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", STYLE.partition("@media")[0]))
"""Colours of the light scheme of style.css, by the name of its variable."""
RUNS = ("kept", "short", "dropped", "failed", "s4", "s5", "s6", "s7")  # Colours of the runs of a page
_ATTRIBUTES = re.compile(
    r"fill|fill-opacity|stroke|stroke-(width|opacity|dasharray|dashoffset|linejoin|linecap)|opacity|font-size|text-anchor"
)  # Properties that are attributes of SVG too; the page sets the fonts
_SVG = "http://www.w3.org/2000/svg"
_MOST_POINTS = 240
_BINS_PER_OCTAVE = 4


@dataclass(frozen=True)
class Curve:
    """Points of one run, in their order."""

    label: str  # name of the run
    colour: int  # number of its colour
    x: F64  # `(n,)` places, finite, at floor one
    y: F64  # `(n,)` values, finite


@dataclass(frozen=True)
class Chart:
    """A drawing with its title, and with words for readers without sight."""

    title: str
    words: str
    svg: Markup


def draw_histogram(
    name: str,  # unique on the page
    title: str,  # name of the counts
    axis: str,  # name of the quantity on the axis
    unit: int,  # value from which quarters of octaves are counted, so that it begins a bin; positive
    series: Mapping[Role, Counter[int]],  # numbers by value and role, at floor one
    marks: Mapping[int, str],  # texts of ours by the value at which they have a line. All are drawn.
) -> Chart:
    """Draws stacked counts over bins of a logarithmic axis, from the first to the last that is used."""
    values = np.maximum([*marks, *(value for counts in series.values() for value in counts)] or [unit], 1)
    places = np.floor(np.log2(values / unit) * _BINS_PER_OCTAVE)
    edges = unit * np.exp2(np.arange(places.min(), places.max() + 2) / _BINS_PER_OCTAVE)
    bins = {
        role: np.histogram(np.maximum([*counts], 1), edges, weights=[*counts.values()])[0]
        for role, counts in series.items()
    }
    figure, axes = _figure(8, 3.3)
    below = np.zeros(len(edges) - 1)
    # a row in ten thousand would be less than a pixel high, and gone
    floor = 0.004 * max(float(np.sum([*bins.values()], axis=0).max()), 1.0)
    for role, counts in bins.items():
        heights = np.where(counts > 0, np.maximum(counts, floor), 0)
        axes.bar(edges[:-1], heights, np.diff(edges) * 0.94, below, align="edge", color=COLOURS[role])
        below = below + heights
    axes.set_xscale("log")
    axes.set_xlim(float(edges[0]), float(edges[-1]))
    fine = [step * 10**power for power in range(13) for step in (1, 2, 5)]
    ticks = [tick for tick in fine if edges[0] <= tick <= edges[-1]]
    powers = [tick for tick in ticks if str(tick).strip("0") == "1"]
    axes.xaxis.set_major_locator(FixedLocator(ticks if len(ticks) <= 9 else powers))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(axis)
    highest = max(1.0, float(below.max()))  # of an empty corpus
    axes.set_ylim(0, highest * (1.08 + 0.1 * len(marks)))
    middle = math.sqrt(edges[0] * edges[-1])
    box = {"facecolor": COLOURS["ground"], "edgecolor": "none", "pad": 1}  # hides the line of another mark
    for number, value in enumerate(sorted(marks, reverse=True)):
        height = highest * (1.05 + 0.1 * number)
        axes.plot([value, value], [0, height], color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)))
        side, shift = ("right", -5) if value > middle else ("left", 5)
        text = axes.annotate(
            marks[value], (value, height), (shift, 0), textcoords="offset points", bbox=box, fontsize=8.5
        )
        text.set(ha=side, va="center", color=COLOURS["ink"])
    sums = ", ".join(f"{counts.total():,} {role}" for role, counts in series.items())
    return Chart(title, "; ".join([sums, *(f"line at {text}" for text in marks.values())]), _svg(figure, name))


def draw_curves(name: str, title: str, curves: Sequence[Curve], alarms: Sequence[int] = ()) -> Chart:
    """Draws curves over steps; more than 240 points as the mean of equally many, with lowest and highest as a band.

    No other chart of the page has the name, there is a curve at least, and steps with an alarm have a line.
    """
    figure, axes = _figure(4.7, 2.3)
    for curve in curves:
        colour, x, y = COLOURS[RUNS[curve.colour]], curve.x, curve.y
        if len(x) > _MOST_POINTS:
            x, y, low, high = _averaged(x, y)
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        # a single point has no line
        axes.plot(x, y, color=colour, linewidth=1.4, marker="o" if len(x) == 1 else None, markersize=3)
    left, right = axes.get_xlim()  # lines of alarms must not widen the axis
    for step in alarms:
        axes.axvline(step, color=COLOURS["failed"], linewidth=1, linestyle=(0, (3, 3)))
    axes.set_xlim(left, right)
    for formatted in (axes.xaxis, axes.yaxis):
        formatted.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    return Chart(title, "the figures are in the table", _svg(figure, name))


def draw_intervals(name: str, title: str, rows: Sequence[tuple[str, float, tuple[float, float] | None]]) -> Chart:
    """Draws differences in points as dots with their 95% intervals around a line at 0; no other chart has the name."""
    figure, axes = _figure(8, 0.7 + 0.3 * len(rows))
    axes.axvline(0, color=COLOURS["muted"], linewidth=1)
    for place, (_, difference, interval) in enumerate(rows):
        if interval:
            axes.plot(interval, [place, place], color=COLOURS["kept"], linewidth=1.6)
        axes.plot([difference], [place], color=COLOURS["kept"], marker="o", markersize=6)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], parse_math=False)  # a name may be $x$
    axes.set_ylim(len(rows) - 0.4, -0.6)  # downwards: the first row on top
    axes.yaxis.grid(visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.set_xlabel("points")
    return Chart(title, "the figures are in the table", _svg(figure, name))


def short(value: float) -> str:
    """A number in few characters: 0.0012, 3.14, 12k, 3M, 1e-08."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}" if abs(value) >= 1e-4 or not value else f"{value:.1e}"


def _averaged(x: F64, y: F64) -> tuple[F64, F64, F64, F64]:
    """240 places with the mean, lowest and highest value of equally many points each."""
    bounds = np.linspace(0, len(x), _MOST_POINTS + 1).astype(np.int64)[:-1]
    counts = np.diff([*bounds.tolist(), len(x)])
    mean_x, mean_y = (np.add.reduceat(values, bounds) / counts for values in (x, y))
    return mean_x, mean_y, np.minimum.reduceat(y, bounds), np.maximum.reduceat(y, bounds)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of a size in inches, without pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(length=0, labelsize=8.5, colors=COLOURS["muted"])
    axes.xaxis.label.set(color=COLOURS["muted"], fontsize=8.5)
    axes.yaxis.grid(visible=True, color=COLOURS["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    for formatted in (axes.xaxis, axes.yaxis):
        formatted.set_major_formatter(FuncFormatter(lambda value, _: short(float(value))))
    axes.spines["bottom"].set_color(COLOURS["muted"])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str) -> Markup:
    """The figure as an element of a page. The name is part of its ids, so that they are unique and always the same."""
    stream = StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):  # else ids are random; texts stay texts
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})  # equal runs, equal bytes
    text = stream.getvalue()
    root = ElementTree.fromstring(text)
    used = set(re.findall(r"#([\w-]+)", text))
    for element in root.iter():
        for child in [*element]:
            if child.tag.rpartition("}")[2] in ("metadata", "style"):  # the policy forbids a style
                element.remove(child)
        element.attrib |= dict(_attributes(element.attrib.pop("style", "")))
        if element.get("id") not in used:  # other figures have the same ones
            element.attrib.pop("id", None)
        if "d" in element.attrib:
            element.set("d", " ".join(element.attrib["d"].split()))
    # matplotlib's own style element, which the policy forbids, says the same
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "aria-hidden": "true"}
    ElementTree.register_namespace("", _SVG)  # HTML knows no prefix such as ns0
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # matplotlib escaped every text


def _attributes(style: str) -> Iterator[tuple[str, str]]:
    """The properties of a style attribute that are attributes too, with the page's colours."""
    for part in style.split(";"):
        name, _, value = (word.strip() for word in part.partition(":"))
        if _ATTRIBUTES.fullmatch(name):
            colour = next((key for key, colour in COLOURS.items() if colour == value), None)
            yield name, f"var(--{colour}, {value})" if colour else value
