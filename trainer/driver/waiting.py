"""Log messages about a slow start of a group, until its first step. It uses neither Ray nor a clock."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from declutr.common.cluster import named_cluster
from declutr.trainer.driver.device import Device
from declutr.trainer.setup.scaling import ScalingConfig

FIRST_SECONDS = 10.0
_AGAIN_SECONDS = 60.0
_WORDS = {"starting": "loading", "fetching": "fetching the run or the shards", "data": "waiting for its first batch"}


class Waiting:
    """Reports what a start waits for: after ten seconds, at each change, and once a minute.

    `device` is that of the run; `resources` are the CPUs and GPUs of Ray's session, by name; `began` is in seconds of
    the clock of `look`.
    """

    def __init__(self, scaling: ScalingConfig, device: Device, resources: Mapping[str, float], began: float) -> None:
        self._scaling, self._device, self._resources, self._began = scaling, device, resources, began
        self._said, self._said_at = "", began
        self._over = False

    def look(self, heartbeats: Sequence[dict[str, Any]], now: float) -> str | None:
        """A message to log now, or None, from the newest heartbeats of this start's workers; `now` is in seconds."""
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
        needed = f"{scaling.cpus_per_worker} CPU(s)" + (" and a GPU" if self._device == "cuda" else "")
        return (
            f"none of {scaling.least_workers} workers has started; each needs {needed}, and Ray has {cpus:g} CPUs and "
            f"{gpus:g} GPUs in total"
        )

    def _of_workers(self, heartbeats: Sequence[dict[str, Any]]) -> str:
        counts: dict[str, int] = {}
        for heartbeat in heartbeats:
            counts[heartbeat["phase"]] = counts.get(heartbeat["phase"], 0) + 1
        size = max(heartbeat["size"] for heartbeat in heartbeats)
        doing = ", ".join(f"{number} {_WORDS.get(phase, phase)}" for phase, number in sorted(counts.items()))
        return f"{len(heartbeats)} of {size} workers have started ({doing})"


def oversubscribed(scaling: ScalingConfig) -> str | None:
    """A message if the workers reserve more CPUs than this machine has, or None."""
    workers, each, there = scaling.most_workers, scaling.cpus_per_worker, os.cpu_count() or 1
    if named_cluster(scaling.address)[1] or workers * each <= there:
        return None
    return (
        f"scaling.num_workers = {workers} with {each} CPU(s) each exceed the {there} CPUs of this machine: the start "
        "and every step take longer than with fewer workers"
    )
