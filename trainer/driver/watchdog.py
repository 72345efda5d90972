"""Finds slow starts and hanging workers from heartbeats. It uses neither Ray nor a clock."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from declutr.common.cluster import named_cluster
from declutr.trainer.setup.scaling import ScalingConfig

Snapshot = dict[str, Any]

_START_SECONDS = 60.0  # least limit for a group's first step, which opens the data and compiles
_ALONE_SECONDS = 60.0  # added while no worker of the group writes: usually Ray is replacing the group
_SILENT_SECONDS = 10.0  # a worker writes every 0.5 to 2 s; after this long it is stopped or cut off
FIRST_SECONDS = 10.0
_AGAIN_SECONDS = 60.0  # between two messages about the same wait
_WORDS = {"starting": "loading", "fetching": "fetching the run or the shards", "data": "waiting for its first batch"}


@dataclass(frozen=True)
class Hang:
    """A worker that holds up its group.

    Attributes:
        heartbeat: its newest heartbeat.
        silent_seconds: time since it wrote a heartbeat.
        still_seconds: time since the group made progress.
        waiting: end of the message, on the other workers.
    """

    heartbeat: Snapshot
    silent_seconds: float
    still_seconds: float
    waiting: str

    def __str__(self) -> str:
        heartbeat = self.heartbeat
        state = (
            "in" if self.silent_seconds < _SILENT_SECONDS else f"silent for {self.silent_seconds:.0f} s, last seen in"
        )
        return (
            f"worker {heartbeat['rank']} (host {heartbeat['host']}, pid {heartbeat['pid']}) hangs: "
            f"{state} {heartbeat['phase']} after step {max(0, heartbeat['step'])}, "
            f"no progress for {self.still_seconds:.0f} s{self.waiting}"
        )


@dataclass
class Watchdog:
    """Compares heartbeats from look to look.

    Attributes:
        watchdog_timeout_seconds: a group without progress for this long hangs.
        group: identity of the group that writes now.
        reached: last finished step that any worker has reported.
    """

    watchdog_timeout_seconds: float
    group: str = ""
    reached: int = -1
    _written: dict[tuple[str, int], tuple[Snapshot, float]] = field(default_factory=dict)
    _progress: tuple[tuple[Any, ...], float] = ((), 0.0)

    def look(self, heartbeats: Sequence[Snapshot], now: float) -> Hang | None:
        """Reads the newest heartbeats of all ranks, also of earlier groups; returns the worker that hangs, or None.

        `now` is in seconds of any steady clock.
        """
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
        signs = (self.group, *((rank, p["step"], p["entered"], p["phase"]) for rank, (p, _) in ranks))
        if signs != self._progress[0]:
            self._progress = (signs, now)
        still = now - self._progress[1]
        starting = any(heartbeat["steps"] == 0 for heartbeat, _ in current.values())
        timeout = max(self.watchdog_timeout_seconds, _START_SECONDS) if starting else self.watchdog_timeout_seconds
        if all(now - at >= _SILENT_SECONDS for _, at in current.values()):
            timeout += _ALONE_SECONDS
        if still < timeout or all(p["phase"] == "ended" for p, _ in current.values()):
            return None
        if any(p["phase"] == "fetching" and now - at < _SILENT_SECONDS for p, at in current.values()):
            return None  # the store's retries have a separate time limit
        return self._blame(current, now, still)

    def _blame(self, current: dict[int, tuple[Snapshot, float]], now: float, still: float) -> Hang:
        """Names the silent worker, else the one with the fewest exchanges entered, of equals the lowest rank."""
        silent = {rank: now - at for rank, (_, at) in current.items()}
        worst = max(silent, key=lambda rank: silent[rank])
        if silent[worst] < _SILENT_SECONDS:
            worst = min(current, key=lambda rank: (current[rank][0]["entered"], rank))
        phases = sorted({p["phase"] for rank, (p, _) in current.items() if rank != worst})
        ahead = any(p["entered"] > current[worst][0]["entered"] for p, _ in current.values())
        if phases and not ahead and silent[worst] < _SILENT_SECONDS:
            waiting = f"; all {len(current)} workers wait in the same exchange, none is missing"
        else:
            waiting = f"; the others wait in {' and '.join(phases)}" if phases else ""
        return Hang(current[worst][0], silent[worst], still, waiting)


class Waiting:
    """Reports what a start waits for: after ten seconds, at each change, and once a minute.

    `workers` is the least number of workers; `began` is in seconds of the clock of `look`.
    """

    def __init__(self, workers: int, began: float) -> None:
        self._workers, self._began = workers, began
        self._sentence, self._sentence_at = "", began
        self._over = False

    def look(self, heartbeats: Sequence[Snapshot], now: float) -> str | None:
        """A message to log now, or None, from the newest heartbeats of this start's workers; `now` is in seconds."""
        self._over = self._over or any(heartbeat["steps"] for heartbeat in heartbeats)
        if self._over or now - self._began < FIRST_SECONDS:
            return None
        counts = Counter(heartbeat["phase"] for heartbeat in heartbeats)
        doing = ", ".join(f"{number} {_WORDS.get(phase, phase)}" for phase, number in sorted(counts.items()))
        size = max((heartbeat["size"] for heartbeat in heartbeats), default=self._workers)
        sentence = f"{len(heartbeats)} of {size} workers have started{f' ({doing})' if doing else ''}"
        if sentence == self._sentence and now - self._sentence_at < _AGAIN_SECONDS:
            return None
        self._sentence, self._sentence_at = sentence, now
        return f"no step yet after {now - self._began:.0f} s: {sentence}"


def oversubscribed(scaling: ScalingConfig) -> str | None:
    """A message if the workers reserve more CPUs than this machine has, or None."""
    workers, cpus, there = scaling.most_workers, scaling.cpus_per_worker, os.cpu_count() or 1
    if named_cluster(scaling.address)[1] or workers * cpus <= there:
        return None
    return (
        f"scaling.num_workers = {workers} with {cpus} CPU(s) each exceed the {there} CPUs of this machine: the start "
        "and every step take longer than with fewer workers"
    )
