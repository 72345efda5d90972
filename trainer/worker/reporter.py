"""Reports metrics to Ray Train, for Ray's dashboard, Tune and Anyscale."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray.train


class Reporter:
    """Reports the newest metrics every few minutes, without a checkpoint.

    Args:
        minutes: least time between two reports; None: never.
        clock: a steady clock, in seconds.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._clock = clock
        self._last = clock()

    def due(self) -> bool:
        """True if the time for a report has come; only the first worker's answer counts."""
        return self._seconds is not None and self._clock() - self._last >= self._seconds

    def report(self, step: int, line: Mapping[str, Any] | None) -> None:
        """Reports a step; all workers call it, because Ray waits for each of them.

        Args:
            step: step just taken.
            line: the newest line of metrics; None except on the first worker, whose metrics Ray shows.
        """
        shown = {name: value for name, value in (line or {}).items() if name != "kind"}
        ray.train.report({"step": step, **shown})
        self._last = self._clock()
