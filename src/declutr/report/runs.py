"""The page on runs: verdicts, curves, failures and settings from the files of their folders."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from declutr.common.errors import ConfigError, ShardError, UsageError
from declutr.inspection.order import RunOrder, read_order
from declutr.report.charts import RUNS, Chart, Curve, draw_curves, short
from declutr.report.page import REPORT, Label, write_page
from declutr.report.record import RunRecord, read_runs
from declutr.trainer.objectives.config import REPORTED

_OPTIMIZER = ("lr", "grad_norm")
_SPEED = ("tokens_per_second", "documents_per_second", "padding_share", "data_wait_share", "mfu", "peak_memory_mib")
_BATCH = ("batch_uniformity", "batch_participation_ratio")
_NOT_SHOWN = {"kind", "step", "time", "seconds", "skipped", "num_selected", "num_tokens", "flops", "loss"}
_CORPUS_ROWS = re.compile(r"(^|_)corpus_\d+_rows$")
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
}
"""Names of metrics as the page shows them; others keep theirs."""
_TITLES = {
    "verdict": "Verdict",
    "loss": "Losses",
    "corpora": "Corpora",
    "optimizer": "Learning rate and gradient",
    "speed": "Speed",
    "scores": "Held-out scores and spread",
    "events": "Events",
}


def write_runs_page(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes `report.html` on runs to `output`, or to the folder `report` of the first; returns the page.

    Raises:
        UsageError: a folder is not a run, has files that cannot be read, or there are too many.
    """
    if len(folders) > len(RUNS):
        raise UsageError(f"{len(folders)} runs: a page compares at most {len(RUNS)}; name fewer")
    runs = read_runs(folders)
    orders, reasons = dict[str, RunOrder](), list[str]()
    for run in runs:
        try:
            orders[run.name] = read_order(run.folder)
        except (UsageError, ConfigError, ShardError, OSError) as error:
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
            "loss": [_Curves(runs, "step", losses, "loss")],
            "optimizer": [_Curves(runs, "step", _OPTIMIZER, "optimizer")],
            "speed": [_Curves(runs, "step", _SPEED, "speed")],
            "scores": [_Curves(runs, "validation", scores, "scores"), _Curves(runs, "step", _BATCH, "batch")],
        },
        corpora=list(_corpora(runs, orders)),
        events=list(_events(runs)),
        settings=_settings(runs),
    )
    return path


@dataclass(frozen=True)
class _Glance:
    """State, verdict and faults of a run, in words."""

    run: RunRecord
    verdict: str
    state: str
    faults: str


def _glance(run: RunRecord, order: RunOrder | None) -> _Glance:
    of = f" of {order.last_step:,}" if order is not None else ""
    if run.summary is not None:
        state = f"Ended after step {run.summary.steps:,}{of} ({run.summary.ended}): {run.summary.seconds:,.0f} s."
    else:
        newest = max((line["time"] for line in run.lines), default=0.0)
        written = _moment(newest) or "never"
        state = f"Not ended: step {run.last_step:,}{of} is the newest in the metrics, written {written}."
    verdict = "no verdict before the run ends" if run.summary is None else run.summary.verdict.sentence
    kinds = Counter(event.kind for event in run.events)
    skipped = Counter(name for line in run.lines for name in line if _is_skip(name) and line[name])
    of_tasks = "".join(f", {skipped[name]:,} of the task {name[:-8]}" for name in sorted(skipped) if name != "skipped")
    faults = (
        f"{kinds['start']} start(s), {kinds['failure']} failure(s), {skipped['skipped']:,} step(s) without an update "
        f"because of a bad loss{of_tasks}."
    )
    return _Glance(run, verdict, state, faults)


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


class _Curves:
    """Charts of metrics over steps, and their figures as a table's rows."""

    def __init__(self, runs: Sequence[RunRecord], kind: str, names: Sequence[str], prefix: str) -> None:
        self.charts, self.rows = list[Chart](), list[list[object]]()
        alarms = [event.step for event in runs[0].events if event.kind == "alarm"] if len(runs) == 1 else []
        for name in names[:_MOST_CHARTS]:
            curves = [Curve(run.name, colour, *run.series(kind, name)) for colour, run in enumerate(runs)]
            curves = [curve for curve in curves if len(curve.x)]
            title = MEANING.get(name, name)
            if curves:
                self.charts.append(draw_curves(f"{prefix}-{len(self.charts)}", title, curves, alarms))
            for curve in curves:
                label = title if len(runs) == 1 else f"{title}: {curve.label}"
                values = (curve.y[0], curve.y[-1], curve.y.mean(), curve.y.min(), curve.y.max())
                self.rows.append([label, *(short(float(value)) for value in values), len(curve.y)])


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
        keys = {key: None for key in keys if key != "run" and len({repr(run.settings.get(key)) for run in runs}) > 1}
    return {key: [str(run.settings.get(key, "–")) for run in runs] for key in keys}
