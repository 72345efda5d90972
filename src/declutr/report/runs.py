"""The page on runs: verdicts, curves, failures and settings, from the files of their folders, also while they train."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from declutr.common.config import flat_keys
from declutr.common.errors import ConfigError, DamagedError, ShardError, UsageError
from declutr.common.storage import read_record
from declutr.common.yamlfile import YamlError, read_yaml_file
from declutr.inspection.order import RunOrder, read_order
from declutr.report.charts import RUNS, Chart, Curve, draw_curves, short
from declutr.report.page import REPORT, Label, write_page
from declutr.trainer.driver.continuation import FAILURES, MOMENT, SUMMARY
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.objectives.config import REPORTED

F64 = NDArray[np.float64]
_MOST, _LARGEST = 10**15, 1e300  # of a file; differences of larger numbers overflow
_LAST_MOMENT = 2**32  # seconds since 1970
_FAILURE = re.compile(r"^=== (\S+ \S+ \S+), after step (\d+): (.*)$", re.MULTILINE)
_OPTIMIZER = ("lr", "grad_norm")
_SPEED = ("tokens_per_second", "documents_per_second", "padding_share", "data_wait_share", "mfu", "peak_memory_mib")
_BATCH = ("batch_uniformity", "batch_participation_ratio")
_NOT_SHOWN = {"kind", "step", "time", "seconds", "skipped", "num_selected", "num_tokens", "flops", "loss"}
_CORPUS_ROWS = re.compile(r"(^|_)corpus_\d+_rows$")  # they have a table of their own
_MOST_CHARTS = 60  # names come from a file
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
}  # names of metrics as the page shows them; others keep theirs
_TITLES = {
    "verdict": "Verdict",
    "loss": "Losses",
    "corpora": "Corpora",
    "optimizer": "Learning rate and gradient",
    "speed": "Speed",
    "scores": "Held-out scores and spread",
    "events": "Events",
}


class Event(NamedTuple):
    """Something that happened to a run."""

    time: float  # seconds since 1970
    kind: str  # `start`, `failure`, `alarm` or `end`
    step: int  # step after which it happened
    text: str


class _Verdict(msgspec.Struct, frozen=True):
    """Comparison of the exported encoder with the start of the run (trainer/driver/export.py)."""

    sentence: str
    score: str = ""
    start: float | None = None
    exported: float | None = None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    rows: int | None = None


class _Summary(msgspec.Struct, frozen=True):
    """The part of a summary that the page shows."""

    steps: int
    ended: str
    seconds: float
    verdict: _Verdict
    why: str = ""


@dataclass(frozen=True)
class RunRecord:
    """Facts about a run from its files."""

    folder: Path  # folder of the run
    name: str  # A short name, different from those of the other runs of the page
    settings: dict[str, Any]  # its settings by dotted key
    lines: Sequence[dict[str, Any]]  # its lines of metrics, in their order
    summary: _Summary | None  # Summary of a run that ended; None while it trains, and after a failure
    events: Sequence[Event]  # starts, failures, alarms and the end, by time

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[F64, F64]:
        """Steps and values of a metric, without those that were not finite."""
        points = [(line["step"], line[name]) for line in self.of_kind(kind) if line.get(name) is not None]
        values = np.array(points, np.float64).reshape(-1, 2)
        return values[:, 0], values[:, 1]


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs in some folders."""
    wrong = [f"{path}: is no run (it has no config.yaml)" for path in paths if not (path / "config.yaml").is_file()]
    absolute = [path.resolve() for path in paths]
    wrong += [f"{path}: is named twice" for path in sorted({path for path in absolute if absolute.count(path) > 1})]
    if wrong:
        raise UsageError("\n".join(wrong))
    parts = 1  # of the path, as many as tell the runs apart
    while len({path.parts[-parts:] for path in absolute}) < len(absolute):
        parts += 1
    return [_read(path, "/".join(whole.parts[-parts:])) for path, whole in zip(paths, absolute, strict=True)]


def _read(folder: Path, name: str) -> RunRecord:
    try:
        settings = read_yaml_file(folder / "config.yaml")
    except (YamlError, OSError, RecursionError) as error:
        raise UsageError(f"{folder / 'config.yaml'}: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{folder / 'config.yaml'} holds no settings")
    lines = [line for line in map(_sound, read_metrics(folder)) if 0 <= line["step"] < _MOST]
    try:
        summary = read_record(folder / SUMMARY, _Summary)
    except FileNotFoundError:
        summary = None
    except DamagedError as error:
        raise UsageError(f"{error}; the run's `declutr train` command writes it again") from error
    events = [*_failures(folder), *_logged(lines)]
    if summary is not None and lines:
        events.append(Event(lines[-1]["time"], "end", summary.steps, summary.why or summary.ended))
    events.sort(key=lambda event: event.time)
    return RunRecord(folder, name, flat_keys(settings), lines, summary, events)


def _sound(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose numbers can be drawn, and whose time is one of this century or 0."""
    numbers = {
        name: None if isinstance(value, int | float) and not abs(value) < _LARGEST else value
        for name, value in line.items()
    }
    moment = line.get("time")
    sound = isinstance(moment, int | float) and 0 <= moment < _LAST_MOMENT
    return {**numbers, "step": line["step"], "time": moment if sound else 0.0}


def _failures(folder: Path) -> Iterator[Event]:
    try:
        text = (folder / FAILURES).read_text(encoding="utf-8", errors="replace")  # messages of any program
    except FileNotFoundError:
        return
    for moment, step, summary in _FAILURE.findall(text):
        try:
            when = datetime.strptime(moment, f"{MOMENT} %z").timestamp()
        except (ValueError, OverflowError):  # a line that something else wrote
            when = 0.0
        yield Event(when, "failure", int(step[-15:]), summary)  # int of very many digits is refused by Python


def _logged(lines: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Starts, which write their line after their first step, and alarms."""
    for line in lines:
        if line["kind"] == "alarm":
            yield Event(line["time"], "alarm", line["step"], str(line.get("text")))
        elif line["kind"] == "start":
            workers = f"{line['workers']:g} worker(s)" if line.get("workers") else "training loop"
            yield Event(line["time"], "start", line["step"] - 1, workers)  # the line follows the first step of a start


def write_runs_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes `report.html` on runs to `output`, or to the folder `report` of the first; returns the page."""
    if len(folders) > len(RUNS):
        raise UsageError(f"{len(folders)} runs: a page compares at most {len(RUNS)}; name fewer")
    runs = read_runs(folders)
    orders, reasons = dict[str, RunOrder](), list[str]()
    for run in runs:
        try:
            orders[run.name] = read_order(run.folder)
        except (UsageError, ConfigError, ShardError, OSError) as error:  # a run whose shards have gone has a page, too
            reasons.append(f"Without the length of the run: {run.name}: {str(error).splitlines()[0]}")
    hidden = {*_OPTIMIZER, *_SPEED, *_BATCH, *_NOT_SHOWN}
    losses = ["loss", *(name for name in _names(runs, "step") if name not in hidden and not _CORPUS_ROWS.search(name))]
    scores = sorted(_names(runs, "validation"), key=lambda name: (name.startswith(REPORTED), name))
    path = (output or folders[0] / REPORT) / "report.html"
    write_page(
        path,
        "runs.html",
        f"Run report: {', '.join(run.name for run in runs)}",
        sections=_TITLES | {"settings": "Settings" if len(runs) == 1 else "Settings that differ"},
        runs=runs,
        colours=RUNS,
        glances=[_glance(run, orders.get(run.name)) for run in runs],
        reasons=reasons,
        verdicts=list(_verdicts(runs)),
        curves={
            "loss": [_curves(runs, "step", losses, "loss")],
            "optimizer": [_curves(runs, "step", _OPTIMIZER, "optimizer")],
            "speed": [_curves(runs, "step", _SPEED, "speed")],
            "scores": [_curves(runs, "validation", scores, "scores"), _curves(runs, "step", _BATCH, "batch")],
        },
        corpora=list(_corpora(runs, orders)),
        events=list(_events(runs)),
        settings=_settings(runs),
    )
    return path


def _glance(run: RunRecord, order: RunOrder | None) -> dict[str, object]:
    """State, verdict and faults of a run, in words."""
    of = f" of {order.last_step:,}" if order is not None else ""
    if run.summary is not None:
        state = f"Ended after step {run.summary.steps:,}{of} ({run.summary.ended}): {run.summary.seconds:,.0f} s."
    else:
        written = _moment(max((line["time"] for line in run.lines), default=0.0)) or "never"
        step = max((line["step"] for line in run.of_kind("step")), default=0)
        state = f"Not ended: step {step:,}{of} is the newest in the metrics, written {written}."
    verdict = "no verdict before the run ends" if run.summary is None else run.summary.verdict.sentence
    kinds = Counter(event.kind for event in run.events)
    skipped = Counter(name for line in run.lines for name in line if _is_skip(name) and line[name])
    of_tasks = "".join(f", {skipped[name]:,} of the task {name[:-8]}" for name in sorted(skipped) if name != "skipped")
    faults = (
        f"{kinds['start']} start(s), {kinds['failure']} failure(s), {skipped['skipped']:,} step(s) without an update "
        f"because of a bad loss{of_tasks}."
    )
    return {"run": run, "verdict": verdict, "state": state, "faults": faults}


def _moment(seconds: float) -> str | None:
    """Local time of a moment in seconds since 1970; None of 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else None


def _is_skip(name: str) -> bool:
    """True of the metric that says that the main task, or another one, left an update out."""
    return name == "skipped" or name.endswith("_skipped")


def _verdicts(runs: Sequence[RunRecord]) -> Iterator[list[object]]:
    """Rows on the exported encoders against their starts."""
    for run in runs:
        verdict = None if run.summary is None else run.summary.verdict
        if verdict is None or verdict.start is None or verdict.exported is None or verdict.difference is None:
            continue
        interval = None if verdict.interval is None else f"{verdict.interval[0]:+.4f} to {verdict.interval[1]:+.4f}"
        scores = (f"{verdict.start:.4f}", f"{verdict.exported:.4f}", f"{verdict.difference:+.4f}")
        yield [Label(run.name, note=verdict.score), *scores, interval, verdict.rows]


def _curves(runs: Sequence[RunRecord], kind: str, names: Sequence[str], prefix: str) -> dict[str, list[Any]]:
    """Charts of metrics over steps, and their figures as a table's rows."""
    charts, rows = list[Chart](), list[list[object]]()
    alarms = [event.step for event in runs[0].events if event.kind == "alarm"] if len(runs) == 1 else []
    for name in names[:_MOST_CHARTS]:
        curves = [Curve(run.name, colour, *run.series(kind, name)) for colour, run in enumerate(runs)]
        curves = [curve for curve in curves if len(curve.x)]
        title = MEANING.get(name, name)
        if curves:
            charts.append(draw_curves(f"{prefix}-{len(charts)}", title, curves, alarms))
        for curve in curves:
            values = (curve.y[0], curve.y[-1], curve.y.mean(), curve.y.min(), curve.y.max())
            label = title if len(runs) == 1 else f"{title}: {curve.label}"
            rows.append([label, *(short(float(value)) for value in values), len(curve.y)])
    return {"charts": charts, "rows": rows}


def _corpora(runs: Sequence[RunRecord], orders: Mapping[str, RunOrder]) -> Iterator[list[object]]:
    """Rows on what each of several corpora gave to the main task, against its weight."""
    for run in runs:
        corpora = run.settings.get("data")
        if not isinstance(corpora, list):
            continue
        names = [f"corpus_{number}_rows" for number in range(1, len(corpora) + 1)]
        read = [sum(line.get(name) or 0 for line in run.lines if line["kind"] == "step") for name in names]
        sizes = orders[run.name].tasks[""].shards.sizes if run.name in orders else [0] * len(corpora)
        for corpus, rows, size in zip(corpora, read, sizes, strict=True):
            path, weight = (corpus.get(key) if isinstance(corpus, dict) else None for key in ("path", "weight"))
            of_rows = f"{rows / sum(read):.2%}" if sum(read) else None
            passes = f"{rows / size:,.2f}" if size else None
            yield [Label(str(path), note=run.name), weight, f"{rows:,.0f}", of_rows, passes]


def _names(runs: Sequence[RunRecord], kind: str) -> list[str]:
    """Names of the numbers in the lines of a kind, in the order of their first line."""
    names = dict[str, None]()
    for run in runs:
        for line in run.of_kind(kind)[:1] + run.of_kind(kind)[-1:]:
            names |= {name: None for name in line if name not in _NOT_SHOWN and not name.endswith("batch_digest")}
    return [name for name in names if not _is_skip(name)]


def _events(runs: Sequence[RunRecord]) -> Iterator[list[object]]:
    """Rows on starts, failures, alarms and the end of each run."""
    for run in runs:
        for event in run.events:
            text = event.text.partition(". ")[0] if event.kind == "alarm" else event.text  # the remedy is in the head
            kind = f"{run.name}: {event.kind}" if len(runs) > 1 else event.kind
            yield [Label(kind, note=text), _moment(event.time), event.step]


def _settings(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Settings that differ between the runs, a value for each; of a single run all."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    if len(runs) > 1:
        # `run` always differs; repr, because a list cannot be in a set
        keys = {key: None for key in keys if key != "run" and len({repr(run.settings.get(key)) for run in runs}) > 1}
    return {key: [str(run.settings.get(key, "–")) for run in runs] for key in keys}
