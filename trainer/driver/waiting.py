"""The start of a group in words: what it waits for, said while no step is taken yet. No Ray, no clock of its own."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from common.cluster import named_cluster
from trainer.setup.scaling import ScalingConfig

FIRST_SECONDS = 10.0
_AGAIN_SECONDS = 60.0
_WORDS = {"starting": "loading", "fetching": "fetching the run or the shards", "data": "waiting for its first batch"}


class Waiting:
    """Says what a start waits for: after ten seconds, when that changes, and once a minute.

    Args:
        scaling: of the run.
        resources: of Ray's session: CPUs and GPUs by name.
        began: when the start began, in seconds of the clock that `look` is given.
    """

    def __init__(self, scaling: ScalingConfig, resources: Mapping[str, float], began: float) -> None:
        self._scaling, self._resources, self._began = scaling, resources, began
        self._said, self._said_at = "", began
        self._over = False

    def look(self, heartbeats: Sequence[dict[str, Any]], now: float) -> str | None:
        """A sentence to be said now; None where there is none.

        Args:
            heartbeats: the newest of every worker of this start (trainer/worker/heartbeat.py).
            now: in seconds.
        """
        self._over = self._over or any(heartbeat["steps"] for heartbeat in heartbeats)
        if self._over or now - self._began < FIRST_SECONDS:
            return None
        sentence = self._of_workers(heartbeats) if heartbeats else self._of_room()
        if sentence == self._said and now - self._said_at < _AGAIN_SECONDS:
            return None
        self._said, self._said_at = sentence, now
        return f"no step yet after {now - self._began:.0f} s: {sentence}"

    def _of_room(self) -> str:
        scaling, found = self._scaling, self._resources
        cpus, gpus = found.get("CPU", 0), found.get("GPU", 0)
        needed = f"{scaling.cpus_per_worker} CPU(s)" + (" and a GPU" if scaling.device == "cuda" else "")
        return (
            f"none of {scaling.least_workers} workers has begun; each needs {needed}, Ray has {cpus:g} CPUs and "
            f"{gpus:g} GPUs in all"
        )

    def _of_workers(self, heartbeats: Sequence[dict[str, Any]]) -> str:
        counts: dict[str, int] = {}
        for heartbeat in heartbeats:
            counts[heartbeat["phase"]] = counts.get(heartbeat["phase"], 0) + 1
        size = max(heartbeat["size"] for heartbeat in heartbeats)
        doing = ", ".join(f"{number} {_WORDS.get(phase, phase)}" for phase, number in sorted(counts.items()))
        return f"{len(heartbeats)} of {size} workers have begun ({doing})"


def oversubscribed(scaling: ScalingConfig) -> str | None:
    """A sentence where a session on this machine has fewer CPUs than its workers reserve; None where it has enough."""
    workers, each, there = scaling.most_workers, scaling.cpus_per_worker, os.cpu_count() or 1
    if named_cluster(scaling.address)[1] or workers * each <= there:
        return None
    return (
        f"scaling.workers = {workers}, of {each} CPU(s) each, share the {there} CPUs of this machine: start and every "
        "step take longer than with fewer workers"
    )
