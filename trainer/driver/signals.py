"""SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C to the driver: the first requests a stop with a save, a later one exits at once.

A closed terminal or connection sends SIGHUP. A SIGHUP that is ignored, as under `nohup`, stays ignored. Batch systems
announce the end of a job with SIGUSR1.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from declutr.common.console.logs import get_logger

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SAME_SECONDS = 1.0
"""Signals within this time are one request: `timeout` sends SIGTERM twice, a closing terminal and its shell SIGHUP."""


class Signals:
    """Records signals while its block runs, in the main thread only.

    Args:
        clock: seconds of a monotonic clock.

    Attributes:
        received: name of the first signal, or another reason to stop.
        status: exit status for this reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: str | None = None
        self.status = 1
        self._clock = clock
        self._first_at: float | None = None
        self._last: str | None = None
        self._requested = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
            if self._before[signal.SIGHUP] == signal.SIG_IGN:
                del self._before[signal.SIGHUP]
            for number in self._before:
                signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._last:  # not logged by the handler, which may have interrupted a write to the same stream
            message = "%s after %s: stopping at once, without saving; the same command continues after the last save"
            get_logger().warning(message, self._last, self.received)

    def request_stop(self, reason: str) -> None:
        """Requests a stop as a signal does."""
        if self.received is None:
            self.received = reason
            self._requested.set()

    def wait(self, seconds: float) -> bool:
        """Pauses at most this many seconds; True as soon as a stop is requested."""
        return self._requested.wait(seconds)

    def _take(self, number: int, frame: Any) -> None:  # noqa: ARG002 - the signature of a handler
        now, name = self._clock(), signal.Signals(number).name
        if self._first_at is not None and now - self._first_at < _SAME_SECONDS:
            return
        self.status = 128 + number
        if self.received is not None:
            self._last = name
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.status)
        self._first_at = now
        self.request_stop(name)
