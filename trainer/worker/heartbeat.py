"""A worker's heartbeat: its step and its phase. From all, the driver finds hanging workers. No Ray."""

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_KEPT_LINES = 10  # a snapshot is written twice a second
_START_SECONDS = 60.0  # least limit for a group's first step, which opens the data and compiles
_ALONE_SECONDS = 60.0  # added while no worker of the group writes: usually Ray is replacing the group
_SILENT_SECONDS = 10.0  # a worker writes every 0.5 to 2 s; after this long it is stopped or cut off
PHASES = (
    *("starting", "fetching", "choosing kernels"),
    *("validating", "saving", "writing", "reporting", "data", "forward", "ended"),
)  # Phases in their order after a step: while a group waits, the worker in the earliest holds it up


@dataclass
class Heartbeat:
    """Progress of one worker, written by its training thread and read by another."""

    rank: int  # number of the worker
    size: int  # number of workers in the group
    group: str = ""  # identity of the group; a restarted group has a different one
    node: str = ""  # Ray's id of the host
    step: int = -1  # last finished step of the run; -1 before the checkpoint is loaded
    steps: int = 0  # number of steps that this group has finished
    phase: str = "starting"  # one of `PHASES`; forward lasts to the end of the step
    line: dict[str, Any] | None = None  # newest line of metrics; on the first worker only
    logged: list[str] = field(default_factory=list)  # newest lines of its log, oldest first
    num_logged: int = 0  # total number of its log lines
    notice: str = ""  # message about the signal to this worker that stops its group; empty without a signal
    host: str = field(default_factory=socket.gethostname)  # name of the worker's host
    pid: int = field(default_factory=os.getpid)  # its process

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
    """Copies log lines to a worker's heartbeat for the driver, of the first from INFO, of others from WARNING."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        super().__init__(logging.INFO if heartbeat.rank == 0 else logging.WARNING)
        self._heartbeat = heartbeat

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the newest lines."""
        self._heartbeat.logged = [*self._heartbeat.logged[1 - _KEPT_LINES :], record.getMessage()]
        self._heartbeat.num_logged += 1


@dataclass(frozen=True)
class Hang:
    """A worker that holds up its group."""

    heartbeat: dict[str, Any]  # its newest heartbeat
    silent_seconds: float  # time since it wrote a heartbeat
    still_seconds: float  # time since the group made progress
    certain: bool  # false if the other workers are at the same place

    def __str__(self) -> str:
        heartbeat, silent = self.heartbeat, self.silent_seconds >= _SILENT_SECONDS
        state = f"silent for {self.silent_seconds:.0f} s, last seen in" if silent else "in"
        doubt = "" if self.certain else "; all workers are there, so it may be another one"
        return (
            f"worker {heartbeat['rank']} (host {heartbeat['host']}, pid {heartbeat['pid']}) hangs: "
            f"{state} {heartbeat['phase']} after step {max(0, heartbeat['step'])}, "
            f"no progress for {self.still_seconds:.0f} s{doubt}"
        )


@dataclass
class Watchdog:
    """Compares heartbeats from look to look."""

    watchdog_timeout_seconds: float  # a group without progress for this long hangs
    group: str = ""  # identity of the group that writes now
    reached: int = -1  # last finished step that any worker has reported
    _written: dict[tuple[str, int], tuple[dict[str, Any], float]] = field(default_factory=dict)
    _progress: tuple[tuple[Any, ...], float] = ((), 0.0)

    def look(self, heartbeats: Sequence[dict[str, Any]], now: float) -> Hang | None:
        """Reads all ranks' newest heartbeats, also of earlier groups; the one that hangs. `now`: of a steady clock."""
        for heartbeat in heartbeats:
            key = (heartbeat["group"], heartbeat["rank"])
            if key not in self._written or self._written[key][0] != heartbeat:
                self._written[key] = (heartbeat, now)
        if not self._written:
            return None
        # The group that writes now; an earlier group no longer writes.
        self.group = max(self._written, key=lambda key: (self._written[key][1], key[0] == self.group))[0]
        current = {rank: seen for (group, rank), seen in self._written.items() if group == self.group}
        self.reached = max(self.reached, *(heartbeat["step"] for heartbeat, _ in current.values()))
        ranks = sorted(current.items())
        # not the whole heartbeats: `written` changes in a worker that hangs, too
        signs = (self.group, *((rank, p["step"], p["phase"]) for rank, (p, _) in ranks))
        if signs != self._progress[0]:
            self._progress = (signs, now)
        still = now - self._progress[1]
        starting = any(heartbeat["steps"] == 0 for heartbeat, _ in current.values())
        timeout = max(self.watchdog_timeout_seconds, _START_SECONDS) if starting else self.watchdog_timeout_seconds
        if all(now - at >= _SILENT_SECONDS for _, at in current.values()):
            timeout += _ALONE_SECONDS
        if still < timeout or all(p["phase"] == "ended" for p, _ in current.values()):
            return None
        if any(p["phase"] in ("fetching", "writing") and now - at < _SILENT_SECONDS for p, at in current.values()):
            return None  # the retries of a storage have a separate time limit
        return self._blame(current, now, still)

    def _blame(self, current: dict[int, tuple[dict[str, Any], float]], now: float, still: float) -> Hang:
        """Names the silent worker, else the one furthest behind, of equals the lowest rank; all of them start again."""
        silent = {rank: now - at for rank, (_, at) in current.items()}
        worst = max(silent, key=lambda rank: silent[rank])
        if silent[worst] < _SILENT_SECONDS:
            worst = min(current, key=lambda rank: (*_place(current[rank][0]), rank))
        # one worker alone waits for nobody
        apart = len(current) == 1 or len({_place(p) for p, _ in current.values()}) > 1
        return Hang(current[worst][0], silent[worst], still, apart or silent[worst] >= _SILENT_SECONDS)


def _place(heartbeat: dict[str, Any]) -> tuple[int, int]:
    """How far a worker is: its step, and the phase after it."""
    return heartbeat["step"], PHASES.index(heartbeat["phase"])
