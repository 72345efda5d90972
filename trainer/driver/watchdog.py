"""The driver's judgement of its workers' pulses: who hangs, who is slow. No Ray, no clock of its own."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Pulse = dict[str, Any]

_SLOW_STEPS = 20  # a mean over fewer steps says little
_SLOW_LOOKS = 20  # how often in a row a worker must be slow: ten seconds
_START_SECONDS = 60.0  # a group's first step opens the data and compiles: it may take so long in any case
_ALONE_SECONDS = 60.0  # more patience with a group of which nobody writes: mostly Ray is replacing it
_SILENT_SECONDS = 10.0  # a worker writes twice a second; one that does not for so long is stopped or cut off


@dataclass(frozen=True)
class Hang:
    """A worker that holds up its group.

    Attributes:
        pulse: its last.
        silent_seconds: how long it has written nothing.
        still_seconds: how long the group has made no progress.
        waiting: what the others do.
    """

    pulse: Pulse
    silent_seconds: float
    still_seconds: float
    waiting: str

    def __str__(self) -> str:
        pulse = self.pulse
        state = (
            "in" if self.silent_seconds < _SILENT_SECONDS else f"silent for {self.silent_seconds:.0f} s, last seen in"
        )
        return (
            f"worker {pulse['rank']} (host {pulse['host']}, pid {pulse['pid']}) hangs: {state} {pulse['phase']} after "
            f"step {max(0, pulse['step'])}; no progress for {self.still_seconds:.0f} s{self.waiting}"
        )


@dataclass
class Watchdog:
    """Compares pulses from look to look.

    Attributes:
        hang_seconds: a group that makes no progress for so long hangs.
        slow_factor: a worker whose own time is so many times the median's is slow.
    """

    hang_seconds: float
    slow_factor: float
    group: str = ""
    reached: int = -1
    named: set[tuple[str, int]] = field(default_factory=set)
    _written: dict[tuple[str, int], tuple[Pulse, float]] = field(default_factory=dict)
    _progress: tuple[tuple[Any, ...], float] = ((), 0.0)
    _slow_looks: dict[int, int] = field(default_factory=dict)

    def look(self, pulses: Sequence[Pulse], now: float) -> Hang | None:
        """Takes in the newest pulses; the worker that hangs, if one does.

        Args:
            pulses: of all ranks, those of groups that are gone among them.
            now: in seconds, of any steady clock.
        """
        for pulse in pulses:
            key = (pulse["group"], pulse["rank"])
            if key not in self._written or self._written[key][0] != pulse:
                self._written[key] = (pulse, now)
        if not self._written:
            return None
        # The group that writes now; one that is gone writes no more.
        self.group = max(self._written, key=lambda key: (self._written[key][1], key[0] == self.group))[0]
        current = {rank: seen for (group, rank), seen in self._written.items() if group == self.group}
        self.reached = max(self.reached, *(pulse["step"] for pulse, _ in current.values()))
        ranks = sorted(current.items())
        signs = (self.group, *((rank, p["step"], p["entered"], p["phase"]) for rank, (p, _) in ranks))
        if signs != self._progress[0]:
            self._progress = (signs, now)
        still = now - self._progress[1]
        starting = any(pulse["steps"] == 0 for pulse, _ in current.values())
        patience = max(self.hang_seconds, _START_SECONDS) if starting else self.hang_seconds
        if all(now - at >= _SILENT_SECONDS for _, at in current.values()):
            patience += _ALONE_SECONDS
        if still < patience or all(p["phase"] == "ended" for p, _ in current.values()):
            return None
        if any(p["phase"] == "fetching" and now - at < _SILENT_SECONDS for p, at in current.values()):
            return None  # from a store, which has a patience of its own
        return self._blame(current, now, still)

    def _blame(self, current: dict[int, tuple[Pulse, float]], now: float, still: float) -> Hang:
        """Who is silent, else who entered the fewest exchanges; where all wait in the same one, the lowest rank."""
        silent = {rank: now - at for rank, (_, at) in current.items()}
        worst = max(silent, key=lambda rank: silent[rank])
        if silent[worst] < _SILENT_SECONDS:
            worst = min(current, key=lambda rank: (current[rank][0]["entered"], rank))
        others = sorted({p["phase"] for rank, (p, _) in current.items() if rank != worst})
        ahead = any(p["entered"] > current[worst][0]["entered"] for p, _ in current.values())
        if others and not ahead and silent[worst] < _SILENT_SECONDS:
            waiting = f"; all {len(current)} workers wait alike, none is missing"
        else:
            waiting = f"; the others wait in {' and '.join(others)}" if others else ""
        return Hang(current[worst][0], silent[worst], still, waiting)

    def slow(self) -> list[str]:
        """A sentence for each worker that has just been found slow; each is named once a group."""
        means = {
            rank: pulse["own_seconds"]
            for (group, rank), (pulse, _) in self._written.items()
            if group == self.group and pulse["own_seconds"] is not None and pulse["steps"] >= _SLOW_STEPS
        }
        if len(means) < 2:
            return []
        sentences = []
        for rank, own in means.items():
            median = statistics.median(mean for other, mean in means.items() if other != rank)
            self._slow_looks[rank] = self._slow_looks.get(rank, 0) + 1 if own > self.slow_factor * median else 0
            if self._slow_looks[rank] >= _SLOW_LOOKS and (self.group, rank) not in self.named:
                self.named.add((self.group, rank))
                pulse = self._written[(self.group, rank)][0]
                sentences.append(
                    f"worker {rank} (host {pulse['host']}, pid {pulse['pid']}) is slow: {own:.2f} s of its own a step, "
                    f"the others {median:.2f} s"
                )
        return sentences
