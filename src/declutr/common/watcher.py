"""A thread that repeats one call while a block runs."""

import threading
from typing import Self


class Watcher:
    """Calls `look`, which a subclass defines, in a daemon thread every `seconds` while its block runs.

    With `at_once` also before the first pause. An error in `look` ends the thread; Python prints its traceback.
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
