"""SIGTERM, SIGHUP and Ctrl-C to the driver: the first asks for a good end, the second ends at once.

SIGHUP comes when the terminal or the connection is closed. Where it is ignored, as under `nohup`, it stays ignored.
"""

import signal
import threading
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Takes note of signals while its block runs; in a thread that is not the main one it hears nothing.

    Attributes:
        received: name of the first one, or what else asked for the end.
        status: exit status that says so.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.status = 1
        self._heard = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
            if self._before[signal.SIGHUP] == signal.SIG_IGN:
                del self._before[signal.SIGHUP]
            self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Takes the signals (again: `ray.init` has a handler of its own)."""
        if self._before:
            for number in self._before:
                signal.signal(number, self._take)

    def ask(self, reason: str) -> None:
        """Asks for a good end as a signal does."""
        if self.received is None:
            self.received = reason
            self._heard.set()

    def wait(self, seconds: float) -> bool:
        """Pauses; was the end asked for?"""
        return self._heard.wait(seconds)

    def _take(self, number: int, frame: Any) -> None:  # noqa: ARG002 - a handler's arguments
        self.status = 128 + number
        if self.received is not None:
            raise SystemExit(self.status)
        self.ask(signal.Signals(number).name)
