"""Metrics of a run as JSON lines and in loggers, written by rank 0; a resume leaves no step out or twice."""

import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from declutr.common.console.logs import get_logger
from declutr.common.storage import set_aside, write_text
from declutr.trainer.metrics.alarms import Alarms
from declutr.trainer.metrics.loggers import Log, Logger, tensorboard

METRICS = "metrics.jsonl"
TEXTS = ("kind", "alarm", "text")  # names of the values of a line that are texts; all others are numbers or None
_BACK_OFF_SECONDS = 1.0
_LAST_SECONDS = 10.0
_SHOWN_LINES = 5
_TAIL_BYTES = 8192  # of the newest lines
_OF_SCORES = ("validation", "alarm")  # kinds of lines of the weights with which a start begins


def memory_mib() -> float:
    """Memory in MiB of the GPU if one is used, else of this host."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**20
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_memory_mib() -> float:
    """Peak memory so far in MiB, of the GPU if one is used, else of this process."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


class AppendLog:
    """Records are collected in memory and appended to an existing file; a failed flush can simply be repeated.

    Records are written at known offsets, so the next flush overwrites what a failed flush left. The file is open only
    during a flush, so no handle becomes stale when a file system disappears and comes back. Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable = path.stat().st_size  # bytes that an fsync has confirmed; later ones are still in memory
        self._written = self._durable
        self._pieces = bytearray()  # records after the first `_durable` bytes
        self._adding = threading.Lock()
        self._flushing = threading.Lock()

    def add(self, piece: bytes) -> None:
        """Adds a record; never waits for the storage."""
        with self._adding:
            self._pieces += piece

    def flush(self, to_disk: bool = False) -> None:
        """Writes the records that were added, and with `to_disk` forces them to disk."""
        with self._flushing:
            with self._adding:
                new = bytes(self._pieces[self._written - self._durable :])
            if not new and (not to_disk or self._written == self._durable):
                return
            handle = os.open(self.path, os.O_WRONLY)  # no O_CREAT: a new file would lack the earlier records
            try:
                done = 0
                while done < len(new):
                    done += os.pwrite(handle, new[done:], self._written + done)
                if to_disk:
                    os.fsync(handle)
            except OSError:
                self._written = self._durable  # after a failed fsync the file's content is unknown
                raise
            finally:
                os.close(handle)
            self._written += len(new)
            if to_disk:
                with self._adding:
                    del self._pieces[: self._written - self._durable]
                    self._durable = self._written


class MetricsWriter:
    """Appends each step's metrics to `metrics.jsonl` and to loggers in threads, because a storage may fail or hang."""

    def __init__(
        self,
        folder: Path,  # folder of the run
        after_step: int,  # last step of the checkpoint; lines of later steps are deleted, because they are repeated
        # watch the run's own lines, from the first, and are logged and written; None: nothing watches.
        alarms: Alarms | None = None,
        # programs by their name, besides TensorBoard. Their failure does not end the run.
        loggers: Mapping[str, Callable[[], AbstractContextManager[Log]]] | None = None,
        # true if the weights after `after_step` are scored anew, or no longer: earlier scores go.
        validates_again: bool = False,
    ) -> None:
        lines, damaged = _read_lines(folder / METRICS)
        if damaged:
            kept_as = set_aside(folder / METRICS)
            message = "%s: removing damaged lines; the original file is kept as %s"
            get_logger().warning(message, _places(folder / METRICS, damaged), kept_as)
        last_scored = after_step - validates_again
        kept = [line for line in lines if line["step"] <= (last_scored if line["kind"] in _OF_SCORES else after_step)]
        write_text(folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._alarms = alarms
        if alarms:
            alarms.replay(kept)
        self._lines = AppendLog(folder / METRICS)
        programs: dict[str, Callable[[], AbstractContextManager[Log]]] = {
            "TensorBoard": partial(tensorboard, folder, after_step)
        }
        programs |= loggers or {}
        self._loggers = [Logger(name, program) for name, program in programs.items()]
        self._added = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def add(
        self,
        kind: str,  # `step`, `validation` (held-out scores of the weights after a step), or `start` (of a group)
        step: int,  # the step
        values: Mapping[str, Any],  # numbers by name
    ) -> dict[str, Any]:
        """Writes a line of metrics, and the alarms that it gives rise to; returns the line."""
        line = self._add({"kind": kind, "step": step, **values})
        for alarm in self._alarms.add(line) if self._alarms else ():
            get_logger().warning("%s", alarm["text"])
            self._add(alarm)
        return line

    def flush(self) -> None:
        """Writes all lines to the disk before it returns."""
        self._lines.flush(to_disk=True)

    def close(self) -> None:
        """Ends the thread after a last attempt, and the loggers."""
        self._closed = True
        self._added.set()
        self._thread.join(_LAST_SECONDS)  # a storage may hang
        for logger in self._loggers:
            logger.close()

    def _add(self, line: dict[str, Any]) -> dict[str, Any]:
        bad = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
        line |= dict.fromkeys(bad) | {"time": round(time.time(), 3)}  # JSON cannot represent them
        self._lines.add((json.dumps(line, allow_nan=False) + "\n").encode())
        for logger in self._loggers:
            logger.add(line)
        self._added.set()
        return line

    def _run(self) -> None:
        failing = False
        while not self._closed or self._added.is_set():
            self._added.wait()
            self._added.clear()
            try:
                self._lines.flush()
            except OSError as error:
                if self._closed:
                    get_logger().warning("cannot write the last lines of %s (%s)", self._lines.path, error.strerror)
                    return
                if not failing:
                    message = "%s cannot be written now (%s): keeping new lines in memory and retrying"
                    get_logger().warning(message, self._lines.path, error.strerror)
                failing = True
                time.sleep(_BACK_OFF_SECONDS)
                self._added.set()
            else:
                if failing:
                    get_logger().info("metrics are written again; no line is missing")
                failing = False


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads a run's metrics. Damaged lines are skipped and logged; a last line without its end is skipped silently."""
    lines, damaged = _read_lines(folder / METRICS)
    if damaged:
        get_logger().warning("%s: skipping damaged lines", _places(folder / METRICS, damaged))
    return lines


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Valid lines, and the numbers of damaged lines, counted from 1."""
    if not path.is_file():
        return [], []
    lines, damaged = [], []
    for number, raw in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        line = _decoded(raw)
        if line is not None:
            lines.append(line)
        elif raw:
            damaged.append(number)
    return lines, damaged


def _places(path: Path, numbers: list[int]) -> str:
    line_numbers = ", ".join(map(str, numbers[:_SHOWN_LINES])) + (", ..." if len(numbers) > _SHOWN_LINES else "")
    return f"{path}, line{'s' if len(numbers) > 1 else ''} {line_numbers}"


def _decoded(raw: bytes) -> dict[str, Any] | None:
    """A line of metrics; None if it is damaged."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        return None
    whole = isinstance(line, dict) and isinstance(line.get("kind"), str) and type(line.get("step")) is int
    numbers = (value for name, value in line.items() if name not in TEXTS) if whole else ()
    return line if whole and all(value is None or isinstance(value, int | float) for value in numbers) else None


def read_last_step(path: Path) -> dict[str, Any] | None:
    """The newest step's line, read from the end of the file; None before the first. One without its end is skipped."""
    if not path.is_file():
        return None
    size, tail = path.stat().st_size, _TAIL_BYTES
    with path.open("rb") as stream:
        while True:
            stream.seek(max(0, size - tail))
            lines = stream.read().split(b"\n")[:-1]
            newest = map(_decoded, reversed(lines if tail >= size else lines[1:]))  # the first may begin within a line
            line = next((line for line in newest if line is not None and line["kind"] == "step"), None)
            if line is not None or tail >= size:
                return line
            tail *= 8


def find_step(path: Path, step: int) -> dict[str, Any] | None:
    """The line of a step; None without a whole one."""
    if not path.is_file():
        return None
    text = b'"step": %d,' % step  # only lines with it are decoded, as decoding all of a long run takes minutes
    with path.open("rb") as stream:
        rows = (_decoded(raw) for raw in stream if text in raw and raw.endswith(b"\n"))
        return next((line for line in rows if line and (line["kind"], line["step"]) == ("step", step)), None)
