"""What a worker is doing, kept where a thread can read it: step, phase, and how many exchanges it has entered. No Ray.

Of a group that stands still, the worker to blame is the one that has entered the fewest exchanges: the others wait in
one that it did not reach. Keeping count costs a few assignments a step.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trainer.parallel.world import Request, World

_KEPT_WORDS = 10
_SMOOTHING = 0.1  # weight of the newest step in the mean of a worker's own time


@dataclass
class Heartbeat:
    """One worker's place in the run, written by its training thread and read by another.

    Attributes:
        rank: number of the worker.
        size: workers of the group.
        group: identity of the group; a restarted group has another.
        node: Ray's id of the host.
        step: last step that is finished, of this group or of those before; -1 before the checkpoint is loaded.
        steps: steps this group has finished.
        phase: what it does now: starting, fetching, data, forward, gather, update, agree, validating, saving, ended.
        entered: exchanges between workers that it has begun.
        own_seconds: mean time of a step without waiting for data or others; None before the first.
        start: where the time went until this group's first step, in seconds; empty before it: imports, checks, ray,
            group, model, batch, first.
        line: the first worker's last line of metrics.
        said: its last words in the log, oldest first.
        num_logged: how many there were in all.
        notice: the signal to this very worker that ends its group, with the worker's name; empty where there was none.
    """

    rank: int
    size: int
    group: str = ""
    node: str = ""
    step: int = -1
    steps: int = 0
    phase: str = "starting"
    entered: int = 0
    own_seconds: float | None = None
    start: dict[str, float] = field(default_factory=dict)
    line: dict[str, Any] | None = None
    logged: list[str] = field(default_factory=list)
    num_logged: int = 0
    notice: str = ""
    _since: float = field(default_factory=time.monotonic)
    _waited: float = 0.0
    _host: str = field(default_factory=socket.gethostname)

    @contextmanager
    def doing(self, phase: str, waits: bool = False) -> Iterator[None]:
        """The phase while the block runs; `waits`: its time is spent waiting for others."""
        before, begun = self.phase, time.monotonic()
        self.phase, self._since = phase, begun
        try:
            yield
        finally:
            now = time.monotonic()
            self.phase, self._since = before, now
            if waits:
                self._waited += now - begun

    @contextmanager
    def exchange(self, phase: str) -> Iterator[None]:
        """An exchange between all workers, while the block runs."""
        self.entered += 1
        with self.doing(phase, waits=True):
            yield

    def set_phase(self, phase: str) -> None:
        """From now on another phase, until the next."""
        self.phase, self._since = phase, time.monotonic()

    def finish_step(self, step: int, seconds: float) -> None:
        """A step is done; it took so long, waiting for others included."""
        own = max(0.0, seconds - self._waited)
        self._waited = 0.0
        if self.steps > 0:  # a group's first step pays for what is only done once
            self.own_seconds = (
                own if self.own_seconds is None else self.own_seconds + _SMOOTHING * (own - self.own_seconds)
            )
        self.step, self.steps = step, self.steps + 1
        self.set_phase("data")

    def snapshot(self) -> dict[str, Any]:
        """What a watcher needs to know, as JSON."""
        return {
            "rank": self.rank,
            "size": self.size,
            "group": self.group,
            "node": self.node,
            "host": self._host,
            "pid": os.getpid(),
            "step": self.step,
            "steps": self.steps,
            "phase": self.phase,
            "phase_seconds": round(time.monotonic() - self._since, 3),
            "entered": self.entered,
            "own_seconds": self.own_seconds,
            "logged": self.logged,
            "num_logged": self.num_logged,
            "start": self.start,
            "line": self.line,
            "notice": self.notice,
        }

    def record_signal(self, signal: str) -> str:
        """Keeps a signal to this worker; answers the sentence on it."""
        self.notice = f"{signal} to worker {self.rank} (host {self._host}, pid {os.getpid()})"
        return self.notice


class Stopwatch:
    """Where the time goes until the first step, from the start of the command on: parts that add up.

    Args:
        marks: name of a part -> when it ended (Unix time), in order; the first is only a beginning. Those of the driver
            come first, the worker adds its own: their clocks must agree for the part in which they change over.
    """

    def __init__(self, marks: dict[str, float]) -> None:
        self.marks = dict(marks)

    def mark(self, name: str) -> None:
        """A part ends now."""
        self.marks[name] = time.time()

    def parts(self) -> dict[str, float]:
        """Seconds of each part."""
        names, times = list(self.marks), list(self.marks.values())
        return {name: round(end - begin, 2) for name, begin, end in zip(names[1:], times[:-1], times[1:], strict=True)}


def describe_start(step: int, parts: dict[str, float]) -> str:
    """The sentence on a start that a person reads."""
    return f"step {step} after {sum(parts.values()):.1f} s: " + ", ".join(f"{k} {v:.1f}" for k, v in parts.items())


class HeartbeatLogHandler(logging.Handler):
    """Takes what a worker logs onto its heartbeat, for the driver to say: Ray keeps a worker's own output in a file.

    Args:
        heartbeat: of this worker. The first one's news are passed on, of the others only warnings.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(logging.INFO if heartbeat.rank == 0 else logging.WARNING)
        self._heartbeat = heartbeat

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the last few."""
        self._heartbeat.logged = [*self._heartbeat.logged[1 - _KEPT_WORDS :], record.getMessage()]
        self._heartbeat.num_logged += 1


@dataclass(frozen=True)
class CountedWorld(World):
    """The workers, each exchange between them counted.

    Attributes:
        heartbeat: of this worker.
    """

    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(0, 1))

    def gather(self, rows: Tensor, start: int, total: int) -> Tensor:
        """As `World.gather`."""
        with self.heartbeat.exchange("gather"):
            return super().gather(rows, start, total)

    def sum(self, values: Tensor) -> Tensor:
        """As `World.sum`."""
        with self.heartbeat.exchange("gather"):
            return super().sum(values)

    def largest(self, number: int) -> int:
        """As `World.largest`."""
        with self.heartbeat.exchange("gather"):
            return super().largest(number)

    def agree(self, requests: Request) -> Request:
        """As `World.agree`."""
        with self.heartbeat.exchange("agree"):
            return super().agree(requests)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """As `World.sum_gradients`."""
        with self.heartbeat.exchange("update"):
            super().sum_gradients(parameters)
