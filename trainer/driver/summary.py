"""Files that the driver writes at the end of a run or command, and their names: readers of them need no Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.errors import DamagedError
from declutr.common.storage import Record, read_record, write_json
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.objectives.config import NN_ACCURACY

SUMMARY = "summary.json"
SECONDS = "seconds.json"
FAILURES = "failures.log"
MOMENT = "%Y-%m-%d %H:%M:%S"
"""Form of the local time at which a failure is recorded."""


def ended_early(run: Path, patience: int | None, done: int) -> dict[str, Any] | None:
    """Reason and patience of a run's early end; None if it did not end early or has more `patience` now.

    `done` is the step of the newest checkpoint; an end at another step does not count.
    """
    before = _read(run / SUMMARY, _Ended)
    if before is None or before.ended != "early" or before.steps != done:
        return None
    if patience is None or patience > before.patience:
        return None
    return {"why": before.why, "patience": before.patience}


class _Ended(msgspec.Struct, frozen=True):
    """The part of a summary that is read back."""

    ended: str
    steps: int
    why: str = ""
    patience: int = 0


def _read(path: Path, kind: type[Record]) -> Record | None:
    """The content of an optional file; None if it is missing, or damaged, which is logged."""
    try:
        return read_record(path, kind)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        get_logger().warning("%s; continuing without it", error)
        return None


def first_and_last_scores(run: Path) -> dict[str, dict[str, float]]:
    """The first and the last held-out scores of a run, by their keys in the summary; empty without validation."""
    lines = [line for line in read_metrics(run) if line["kind"] == "validation"] or [{}]
    first, last = (
        {name: value for name, value in line.items() if name not in ("kind", "step", "time")}
        for line in (lines[0], lines[-1])
    )
    return {"first_scores": first, "last_scores": last}


def neighbours_of(summary: Mapping[str, Any]) -> list[str]:
    """The accuracy of nearest neighbours of each task with images or sounds, before and after, in words."""
    first, last = summary["first_scores"], summary["last_scores"]
    names = [name for name in last if name.endswith(f"_{NN_ACCURACY}") and None not in (first.get(name), last[name])]
    return [f"{name} {first[name]:.4f} at the start, {last[name]:.4f} at the end" for name in names]


def read_seconds(run: Path) -> float:
    """Training time of all commands of a run, in seconds."""
    return _read(run / SECONDS, float) or 0.0


def add_seconds(run: Path, seconds: float) -> None:
    """Adds the training time of a command in seconds; logs a failed write."""
    path = run / SECONDS
    if not run.is_dir():  # the folder was renamed or deleted: a new folder would look like the run
        return
    try:
        write_json(path, round(read_seconds(run) + seconds, 3))
    except OSError as error:  # must not hide the reason why the run ended
        get_logger().warning("%s cannot be written (%s)", path, error.strerror)
