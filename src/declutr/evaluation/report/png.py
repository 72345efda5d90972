"""Charts as PNG files for slides and papers, drawn by matplotlib without pyplot's global state."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, NullLocator

from declutr.common.storage import atomic_file
from declutr.evaluation.report.charts import Bars, Histogram, count_ticks, short_number
from declutr.evaluation.report.markup import visible

COLOURS = {"kept": "#1f6fa8", "short": "#d98a1f", "dropped": "#8a6bb8", "failed": "#c53a3a"}
"""Colours of the light scheme of style.css."""
_INK = "#1f2328"
_FAINT = "#d7dde3"
_LONGEST_LABEL = 48


def save_histogram(chart: Histogram, path: Path) -> None:
    """Draws a histogram, 8 x 4 inches at 150 dots an inch."""
    figure, axes = _figure(8, 4, chart.title)
    left, widths = chart.edges[:-1], chart.edges[1:] - chart.edges[:-1]
    below = chart.totals() * 0
    for one in chart.series:
        axes.bar(left, one.counts, widths * 0.94, below, align="edge", color=COLOURS[one.role], label=one.label)
        below = below + one.counts
    axes.set_xscale("log")
    axes.set_xlim(float(chart.edges[0]), float(chart.edges[-1]))
    axes.set_xticks(chart.axis_ticks())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(round(value))))
    ticks = count_ticks(int(chart.totals().max()))
    axes.set_yticks(ticks)
    axes.set_ylim(0, ticks[-1] * 1.18)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(round(value))))
    axes.yaxis.grid(visible=True, color=_FAINT, linewidth=0.8)
    axes.set_xlabel(chart.axis)
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: -mark.value)):
        before = chart.place(mark.value) > 0.4
        axes.axvline(mark.value, 0, (1.15 - 0.08 * number) / 1.18, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            mark.label,
            (mark.value, ticks[-1] * (1.12 - 0.08 * number)),
            xytext=(-5 if before else 5, 0),
            textcoords="offset points",
            ha="right" if before else "left",
            va="center",
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    if len(chart.series) > 1:
        figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=4)
    _save(figure, path)


def save_bars(chart: Bars, path: Path) -> None:
    """Draws a bar chart, 8 inches wide at 150 dots an inch; its height grows with the number of bars."""
    figure, axes = _figure(8, 0.9 + 0.32 * len(chart.bars), chart.title)
    places = range(len(chart.bars))
    drawn = axes.barh(places, [bar.value for bar in chart.bars], 0.7, color=[COLOURS[bar.role] for bar in chart.bars])
    axes.bar_label(drawn, [bar.shown for bar in chart.bars], padding=4, fontsize=8.5, parse_math=False)
    labels = [_drawable(bar.label) for bar in chart.bars]
    # A source may well be called $x$.
    axes.set_yticks(places, labels, parse_math=False)
    axes.set_ylim(len(chart.bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max([bar.value for bar in chart.bars], default=0) or 1)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    _save(figure, path)


def _figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.tick_params(length=0, labelsize=8.5, colors=_INK)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _drawable(label: str) -> str:
    """Shortens a label to its end, which distinguishes files, and replaces characters that the font lacks by boxes."""
    shown = visible(label).replace("\n", " ")
    shown = shown if len(shown) <= _LONGEST_LABEL else f"…{shown[1 - _LONGEST_LABEL :]}"
    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(character if ord(character) in known else "□" for character in shown)


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as aside:
        figure.savefig(aside, format="png")
