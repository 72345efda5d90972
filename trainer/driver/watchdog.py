"""Finds slow starts and hanging workers from heartbeats. It uses neither Ray nor a clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from declutr.trainer.worker.heartbeat import PHASES

Snapshot = dict[str, Any]

_START_SECONDS = 60.0  # least limit for a group's first step, which opens the data and compiles
_ALONE_SECONDS = 60.0  # added while no worker of the group writes: usually Ray is replacing the group
_SILENT_SECONDS = 10.0  # a worker writes every 0.5 to 2 s; after this long it is stopped or cut off
_SLOW_SECONDS = 60.0  # a start takes a few seconds, and on a busy machine half a minute


@dataclass(frozen=True)
class Hang:
    """A worker that holds up its group.

    Attributes:
        heartbeat: its newest heartbeat.
        silent_seconds: time since it wrote a heartbeat.
        still_seconds: time since the group made progress.
        certain: false if the other workers are at the same place.
    """

    heartbeat: Snapshot
    silent_seconds: float
    still_seconds: float
    certain: bool

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
        if any(p["phase"] == "fetching" and now - at < _SILENT_SECONDS for p, at in current.values()):
            return None  # the store's retries have a separate time limit
        return self._blame(current, now, still)

    def _blame(self, current: dict[int, tuple[Snapshot, float]], now: float, still: float) -> Hang:
        """Names the silent worker, else the one that is furthest behind, of equals the lowest rank.

        The group starts again as a whole, so that a wrong name among equals costs nothing but the name.
        """
        silent = {rank: now - at for rank, (_, at) in current.items()}
        worst = max(silent, key=lambda rank: silent[rank])
        if silent[worst] < _SILENT_SECONDS:
            worst = min(current, key=lambda rank: (*_place(current[rank][0]), rank))
        apart = len(current) == 1 or len({_place(p) for p, _ in current.values()}) > 1
        return Hang(current[worst][0], silent[worst], still, apart or silent[worst] >= _SILENT_SECONDS)


def _place(heartbeat: Snapshot) -> tuple[int, int]:
    """How far a worker is: its step, and the phase after it."""
    return heartbeat["step"], PHASES.index(heartbeat["phase"])


@dataclass
class SlowStart:
    """Reports once a minute that a start has taken no step yet.

    Attributes:
        began: start, in seconds of the clock of `look`.
    """

    began: float
    _messages: int = 0
    _over: bool = False

    def look(self, heartbeats: Sequence[Snapshot], now: float) -> str | None:
        """A message to log now, or None, from the newest heartbeats of this start's workers; `now` is in seconds."""
        self._over = self._over or any(heartbeat["steps"] for heartbeat in heartbeats)
        if self._over or now - self.began < _SLOW_SECONDS * (self._messages + 1):
            return None
        self._messages += 1
        counts = Counter(heartbeat["phase"] for heartbeat in heartbeats)
        phases = ", ".join(f"{number} {phase}" for phase, number in sorted(counts.items()))
        return f"no step yet after {now - self.began:.0f} s; workers that have started: {phases or 'none'}"
