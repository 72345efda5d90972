"""A thread that repeats one call while a block runs."""

import threading
from typing import Self


class Watcher:
    """Calls `look` every few seconds in a daemon thread while its block runs. A subclass defines `look`.

    An error in `look` ends the thread; Python prints its traceback.

    Args:
        seconds: pause between two calls.
        name: name of the thread.
        at_once: also call before the first pause.
    """

    def __init__(self, seconds: float, name: str, at_once: bool = False) -> None:
        self._seconds, self._at_once = seconds, at_once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def look(self) -> bool | None:
        """Performs one call; False ends the thread."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0 if self._at_once else self._seconds
        # not `sleep`, which the end of the block could not cut short
        while not self._stop.wait(pause) and self.look() is not False:
            pause = self._seconds
