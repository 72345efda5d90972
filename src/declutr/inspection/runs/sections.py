"""Sections of the page on runs. A section without contents is empty and left out."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from declutr.common.console.terminal import age
from declutr.evaluation.report.markup import Html, details, join, share, table, tag
from declutr.inspection.order import RunOrder
from declutr.inspection.runs.line_chart import Chart, Curve, short
from declutr.inspection.runs.record import Event, RunRecord
from declutr.inspection.runs.span_lengths import Lengths
from declutr.trainer.objectives.row_score import REPORTED

_OPTIMIZER = ("lr", "grad_norm")
_SPEED = ("tokens_per_second", "documents_per_second", "padding_share", "data_wait_share", "mfu", "peak_memory_mib")
_BATCH = ("batch_uniformity", "batch_participation_ratio")
_NOT_SHOWN = {"kind", "step", "time", "seconds", "skipped", "num_selected", "num_tokens", "flops", "loss"}
_CORPUS_ROWS = re.compile(r"(^|_)corpus_\d+_rows$")
_MOST_CHARTS = 60  # names come from a file
_NOTHING = Html("")
MEANING = {
    "lr": "learning rate",
    "grad_norm": "gradient norm before clipping",
    "tokens_per_second": "tokens per second",
    "documents_per_second": "documents per second",
    "padding_share": "share of token places that hold padding",
    "data_wait_share": "share of the time that waits for data",
    "mfu": "model FLOPs utilisation",
    "peak_memory_mib": "peak memory, MiB",
    "uniformity": "uniformity (log; lower is more even, 0 is one point)",
    "alignment": "alignment (0 is perfect)",
    "effective_rank": "effective rank",
    "batch_uniformity": "uniformity of the training batch",
    "batch_participation_ratio": "participation ratio of the training batch (dimensions in use)",
}
"""Names of metrics as the page shows them; others keep theirs."""


def glance(runs: Sequence[RunRecord], orders: Mapping[str, RunOrder]) -> Html:
    """State, verdict and alarms of each run."""
    return join(*(_glance(run, orders.get(run.name), len(runs) > 1) for run in runs))


def _glance(run: RunRecord, order: RunOrder | None, named: bool) -> Html:
    of = f" of {order.last_step:,}" if order is not None else ""
    if run.summary is not None:
        state = f"Ended after step {run.summary.steps:,}{of} ({run.summary.ended}): {run.summary.seconds:,.0f} s."
    else:
        newest = max((line["time"] for line in run.lines), default=0.0)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest)) if newest else "never"
        state = f"Not ended: step {run.last_step:,}{of} is the newest in the metrics, written {when}."
    verdict = "no verdict before the run ends" if run.summary is None else run.summary.verdict.sentence
    alarms = [tag("li", event.text, class_="alarm") for event in run.events if event.kind == "alarm"]
    failures = sum(event.kind == "failure" for event in run.events)
    starts = sum(event.kind == "start" for event in run.events)
    skipped = Counter(name for line in run.lines for name in line if _is_skip(name) and line[name])
    others = "".join(f", {skipped[name]:,} of the task {name[:-8]}" for name in sorted(skipped) if name != "skipped")
    faults = (
        f"{starts} start(s), {failures} failure(s), {skipped['skipped']:,} step(s) without an update because of a bad "
        f"loss{others}."
    )
    return tag(
        "div",
        tag("h3", run.name) if named else _NOTHING,
        tag("p", tag("strong", "Better than its start? "), verdict),
        tag("ul", *alarms, class_="glance alarms") if alarms else tag("p", "No alarm."),
        tag("p", state, " ", faults, class_="note"),
        class_="run",
    )


def _is_skip(name: str) -> bool:
    """True of the metric that says that the main task, or another one, left an update out."""
    return name == "skipped" or name.endswith("_skipped")


def verdicts(runs: Sequence[RunRecord]) -> Html:
    """Table of the exported encoders against their starts."""
    rows: list[list[object]] = []
    for run in runs:
        found = None if run.summary is None else run.summary.verdict
        if found is None or found.start is None or found.exported is None or found.difference is None:
            continue
        told = None if found.interval is None else f"{found.interval[0]:+.4f} to {found.interval[1]:+.4f}"
        figures = [f"{found.start:.4f}", f"{found.exported:.4f}", f"{found.difference:+.4f}", told, found.rows]
        rows.append([join(run.name, tag("span", found.score, class_="label note")), *figures])
    if not rows:
        return _NOTHING
    heads = ["run, score", "start", "exported", "difference", "95% interval", "rows"]
    return table("Score of the held-out rows that chose nothing", heads, rows)


def curves(runs: Sequence[RunRecord], kind: str, names: Sequence[str], prefix: str) -> Html:
    """Charts of metrics over steps, and their figures as a table."""
    charts, rows = list[Html](), list[list[object]]()
    for name in names[:_MOST_CHARTS]:
        found = [Curve(run.name, colour, *run.series(kind, name)) for colour, run in enumerate(runs)]
        if not any(len(curve.x) for curve in found):
            continue
        marks = _marks(runs[0]) if len(runs) == 1 else []
        charts.append(Chart(f"{prefix}-{len(charts)}", MEANING.get(name, name), "step", found, marks=marks).draw())
        for curve in (curve for curve in found if len(curve.y)):
            label = MEANING.get(name, name) if len(runs) == 1 else f"{MEANING.get(name, name)}: {curve.label}"
            values = (curve.y[0], curve.y[-1], curve.y.mean(), curve.y.min(), curve.y.max())
            rows.append([label, *(short(float(value)) for value in values), len(curve.y)])
    if not charts:
        return _NOTHING
    heads = ["metric", "first", "last", "mean", "lowest", "highest", "values"]
    return join(
        legend(runs),
        tag("div", *charts, class_="charts"),
        details("Figures of these charts", table("Figures", heads, rows)),
    )


def _marks(run: RunRecord) -> list[tuple[float, str]]:
    """Steps of the alarms."""
    return [(float(event.step), "alarm") for event in run.events if event.kind == "alarm"]


def losses(runs: Sequence[RunRecord]) -> Html:
    """The loss and its terms, and other numbers that the line of a step has."""
    known = {*_OPTIMIZER, *_SPEED, *_BATCH, *_NOT_SHOWN}
    others = [name for name in _names(runs, "step") if name not in known and not _CORPUS_ROWS.search(name)]
    return curves(runs, "step", ["loss", *others], "loss")


def corpora(runs: Sequence[RunRecord], orders: Mapping[str, RunOrder]) -> Html:
    """Table of the rows that each of several corpora gave to the main task, against its weight."""
    rows: list[list[object]] = []
    for run in runs:
        given = run.settings.get("data")
        if not isinstance(given, list):
            continue
        names = [f"corpus_{number}_rows" for number in range(1, len(given) + 1)]
        read = [sum(line.get(name) or 0 for line in run.lines if line["kind"] == "step") for name in names]
        sizes = orders[run.name].tasks[""].shards.sizes if run.name in orders else [0] * len(given)
        for one, mine, size in zip(given, read, sizes, strict=True):
            path, weight = (one.get(key) if isinstance(one, dict) else None for key in ("path", "weight"))
            share_of = f"{mine / sum(read):.2%}" if sum(read) else None
            label = join(str(path), tag("span", run.name, class_="label note"))
            rows.append([label, weight, f"{mine:,.0f}", share_of, f"{mine / size:,.2f}" if size else None])
    if not rows:
        return _NOTHING
    return table("Rows of the main task", ["corpus, run", "weight", "rows read", "share", "passes"], rows)


def optimizer(runs: Sequence[RunRecord]) -> Html:
    """Learning rate and gradient norm."""
    return curves(runs, "step", _OPTIMIZER, "optimizer")


def speed(runs: Sequence[RunRecord]) -> Html:
    """Throughput, padding, data wait and memory."""
    return curves(runs, "step", _SPEED, "speed")


def scores(runs: Sequence[RunRecord]) -> Html:
    """Held-out scores, alignment against uniformity, and the spread of the training batch."""
    names = sorted(_names(runs, "validation"), key=lambda name: (name.startswith(REPORTED), name))
    paths = []
    for colour, run in enumerate(runs):
        lines = [one for one in run.of_kind("validation") if None not in (one.get("alignment"), one.get("uniformity"))]
        points = np.array([[one["uniformity"], one["alignment"]] for one in lines], np.float64).reshape(-1, 2)
        paths.append(Curve(run.name, colour, points[:, 0], points[:, 1]))
    drawn = _NOTHING
    if any(len(path.x) for path in paths):
        title = "alignment against uniformity, one point a validation, the large one last; both are better when lower"
        drawn = tag("div", Chart("path", title, "uniformity", paths, path=True).draw(), class_="charts")
    return join(curves(runs, "validation", names, "scores"), drawn, curves(runs, "step", _BATCH, "batch"))


def _names(runs: Sequence[RunRecord], kind: str) -> list[str]:
    """Names of the numbers in the lines of a kind, in the order of their first line."""
    found = dict[str, None]()
    for run in runs:
        for line in run.of_kind(kind)[:1] + run.of_kind(kind)[-1:]:
            found |= {name: None for name in line if name not in _NOT_SHOWN and not name.endswith("batch_digest")}
    return [name for name in found if not _is_skip(name)]


def lengths(runs: Sequence[RunRecord], spans: Mapping[str, Sequence[tuple[str, Lengths]]]) -> Html:
    """Span lengths of each run, with the name of their task, against their law."""
    charts = list[Html]()
    for colour, run in enumerate(runs):
        for name, found in spans.get(run.name, ()):
            whose = f"{run.name}: " if len(runs) > 1 else ""
            title = f"{whose}{name + ': ' if name else ''}share of the {found.kind} by tokens, dashed their law"
            drawn = [
                Curve(f"{found.number:,} {found.kind}", colour, found.middle, found.found),
                Curve("law", colour, found.middle, found.law, law=True),
            ]
            note = f"largest distance of the distribution functions {found.distance:.4f}, {found.number:,} spans"
            chart = Chart(f"lengths-{len(charts)}", title, "tokens", drawn).draw()
            charts.append(tag("div", chart, tag("p", note, class_="note")))
    return tag("div", *charts, class_="charts") if charts else _NOTHING


def events(runs: Sequence[RunRecord]) -> Html:
    """Starts, failures, alarms and the end of each run, on a time line and as a table."""
    rows: list[list[object]] = []
    drawn = list[Html]()
    for colour, run in enumerate(runs):
        drawn += [tag("p", run.name, class_="note") if len(runs) > 1 else _NOTHING, _time_line(run, colour)]
        for event in run.events:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)) if event.time else None
            what = tag("span", f"{f'{run.name}: ' if len(runs) > 1 else ''}{event.kind}", class_=f"event {event.kind}")
            text = event.text.partition(". ")[0] if event.kind == "alarm" else event.text  # the remedy is in the head
            rows.append([join(what, tag("span", text, class_="label note")), when, event.step])
    if not rows:
        return _NOTHING
    return join(*drawn, table("Starts, failures, alarms and ends", ["event", "time", "after step"], rows))


def _time_line(run: RunRecord, colour: int) -> Html:
    """Time of the run from its first start: a bar while steps were logged, a line for each event."""
    begin, end = run.span_seconds
    length = max(end - begin, 1e-3)
    parts = [
        tag("title", f"Time line of {run.name}; the table below has its events", id=f"time-{colour}-title"),
        tag("rect", x="0", y="20", width="100%", height="8", rx="3", class_="track"),
    ]
    for first, last in _working(run):
        left, width = 100 * (first - begin) / length, max(100 * (last - first) / length, 0.2)
        parts.append(tag("rect", x=f"{left:.2f}%", y="20", width=f"{width:.2f}%", height="8", class_=f"s{colour}"))
    for event in run.events:
        x = f"{100 * max(0.0, event.time - begin) / length:.2f}%"
        parts.append(
            tag("line", tag("title", _told(event)), x1=x, x2=x, y1="10", y2="38", class_=f"event {event.kind}")
        )
    for place in (0.0, 0.5, 1.0):
        side = {0.0: "start", 0.5: "middle", 1.0: "end"}[place]
        parts.append(tag("text", age(place * length), x=f"{100 * place:g}%", y="54", class_=f"tick {side}"))
    return tag("svg", *parts, role="img", aria_labelledby=f"time-{colour}-title", class_="timeline", height="60")


def _working(run: RunRecord) -> Iterator[tuple[float, float]]:
    """First and last moment of the steps between two starts."""
    starts = [event.time for event in run.events if event.kind == "start"]
    moments = np.array(sorted(line["time"] for line in run.of_kind("step") if line.get("time")))
    for start, after in pairwise([*starts, np.inf]):
        mine = moments[(moments >= start) & (moments < after)]
        if len(mine):
            yield start, float(mine[-1])


def _told(event: Event) -> str:
    return f"{event.kind} after step {event.step:,}: {event.text}"


def settings(runs: Sequence[RunRecord]) -> Html:
    """Settings that differ between the runs; of a single run all."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    if len(runs) == 1:
        rows: list[list[object]] = [[key, str(runs[0].settings[key])] for key in keys]
        return details("All settings", table("Settings", ["setting", "value"], rows), id="all-settings")
    differing = [key for key in keys if key != "run" and len({repr(run.settings.get(key)) for run in runs}) > 1]
    if not differing:
        return tag("p", "All settings are equal, except the folders.")
    rows = [[key, *(str(run.settings.get(key, "–")) for run in runs)] for key in differing]
    note = f"{share(len(differing), len(keys))} of the settings differ."
    return join(tag("p", note, class_="note"), table("Settings", ["setting", *(run.name for run in runs)], rows))


def legend(runs: Sequence[RunRecord]) -> Html:
    """Names and colours of the runs, if there are several."""
    if len(runs) == 1:
        return _NOTHING
    names = [tag("span", tag("i", class_=f"swatch s{colour}"), run.name) for colour, run in enumerate(runs)]
    return tag("p", *names, class_="legend")
