"""A run as its files tell it, also while it still trains."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from declutr.common.config import flat_keys
from declutr.common.errors import DamagedError, UsageError
from declutr.common.storage import read_record
from declutr.common.yamlfile import YamlError, read_yaml_file
from declutr.trainer.driver.continuation import FAILURES, MOMENT, SUMMARY
from declutr.trainer.metrics.metrics import read_metrics

F64 = NDArray[np.float64]

_MOST, _LARGEST = 10**15, 1e300
_LAST_MOMENT = 2**32  # seconds since 1970
_FAILURE = re.compile(r"^=== (\S+ \S+ \S+), after step (\d+): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        time: seconds since 1970.
        kind: `start`, `failure`, `alarm` or `end`.
        step: step after which it happened.
        text: what happened.
    """

    time: float
    kind: str
    step: int
    text: str


class Verdict(msgspec.Struct, frozen=True):
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
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True)
class RunRecord:
    """Facts about a run from its files.

    Attributes:
        folder: folder of the run.
        name: a short name, different from those of the other runs of the page.
        settings: its settings by dotted key.
        lines: its lines of metrics, in their order.
        summary: summary of a run that ended; None while it trains, and after a failure.
        events: starts, failures, alarms and the end, by time.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    lines: Sequence[dict[str, Any]]
    summary: _Summary | None
    events: Sequence[Event]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[F64, F64]:
        """Steps and values of a metric, without those that were not finite."""
        points = [(line["step"], line[name]) for line in self.of_kind(kind) if line.get(name) is not None]
        values = np.array(points, np.float64).reshape(-1, 2)
        return values[:, 0], values[:, 1]

    @property
    def last_step(self) -> int:
        """The newest step in the metrics; 0 before the first."""
        return max((line["step"] for line in self.of_kind("step")), default=0)


def is_run(path: Path) -> bool:
    """True if a folder is that of a run that has started."""
    return (path / "config.yaml").is_file()


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs in some folders.

    Raises:
        UsageError: a folder is not a run, is named twice, or has settings that cannot be read.
    """
    wrong = [f"{path}: is no run (it has no config.yaml)" for path in paths if not is_run(path)]
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
        text = (folder / FAILURES).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for moment, step, summary in _FAILURE.findall(text):
        try:
            when = datetime.strptime(moment, f"{MOMENT} %z").timestamp()
        except (ValueError, OverflowError):
            when = 0.0
        yield Event(when, "failure", int(step[-15:]), summary)


def _logged(lines: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Starts, which write their line after their first step, and alarms."""
    for line in lines:
        if line["kind"] == "alarm":
            yield Event(line["time"], "alarm", line["step"], str(line.get("text")))
        elif line["kind"] == "start":
            workers = f"{line['workers']:g} worker(s)" if line.get("workers") else "training loop"
            yield Event(line["time"], "start", line["step"] - 1, workers)
