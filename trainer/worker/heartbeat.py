"""A worker's heartbeat, which a thread can read: its step and its phase. No Ray."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_KEPT_LINES = 10  # a snapshot is written twice a second
PHASES = ("starting", "fetching", "validating", "reporting", "saving", "data", "forward", "ended")
"""Phases in their order after a step: while a group waits, the worker in the earliest holds it up."""


@dataclass
class Heartbeat:
    """Progress of one worker, written by its training thread and read by another.

    Attributes:
        rank: number of the worker.
        size: number of workers in the group.
        group: identity of the group; a restarted group has a different one.
        node: Ray's id of the host.
        step: last finished step of the run; -1 before the checkpoint is loaded.
        steps: number of steps that this group has finished.
        phase: one of `PHASES`; forward lasts to the end of the step.
        line: newest line of metrics; on the first worker only.
        logged: newest lines of its log, oldest first.
        num_logged: total number of its log lines.
        notice: message about the signal to this worker that stops its group; empty without a signal.
        host: name of the worker's host.
        pid: its process.
    """

    rank: int
    size: int
    group: str = ""
    node: str = ""
    step: int = -1
    steps: int = 0
    phase: str = "starting"
    line: dict[str, Any] | None = None
    logged: list[str] = field(default_factory=list)
    num_logged: int = 0
    notice: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Sets the phase while the block runs."""
        before = self.phase
        self.phase = phase
        try:
            yield
        finally:
            self.phase = before

    def finish_step(self, step: int) -> None:
        """Records a finished step."""
        self.step, self.steps, self.phase = step, self.steps + 1, "data"

    def snapshot(self) -> dict[str, Any]:
        """The fields that the driver reads, as JSON values."""
        # `written` changes with every snapshot, so that the watchdog sees that this worker still writes.
        return vars(self) | {"written": time.time()}


class HeartbeatLogHandler(logging.Handler):
    """Copies a worker's log lines into its heartbeat so that the driver logs them; Ray writes them only to a file.

    The first worker's lines count from INFO, the others' from WARNING.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(logging.INFO if heartbeat.rank == 0 else logging.WARNING)
        self._heartbeat = heartbeat

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the newest lines."""
        self._heartbeat.logged = [*self._heartbeat.logged[1 - _KEPT_LINES :], record.getMessage()]
        self._heartbeat.num_logged += 1
