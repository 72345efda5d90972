"""Loggers: programs for looking at metrics, which get what `metrics.jsonl` has. None of them can stop a run."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from declutr.common.console.logs import get_logger

_NOT_SHOWN = ("kind", "step", "time", "batch_digest")
_MOST_KEPT = 10_000  # lines in memory for a logger that fails, about 10 MiB


class MetricsLogger(Protocol):
    """A logger of one start of a run. It may fail at any time."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of metrics; never waits."""

    def flush(self, to_disk: bool = False) -> None:
        """Passes on the lines that were added; a call after a failed one tries all of them again.

        Raises:
            OSError: they cannot be passed on now.
        """

    def close(self) -> None:
        """Passes on the last lines, and waits a limited time for it.

        Raises:
            OSError: they could not be passed on.
        """


class GuardedLogger:
    """A logger whose failure is logged once and its missing lines counted, while the run continues.

    Args:
        name: name of the program for messages.
        start: starts the logger; may fail.
    """

    # Any error of a logger is caught here, and nowhere else: its packages are optional and not ours, and the loss of
    # their view, said once in the log, is cheaper than the run. metrics.jsonl has every line.

    def __init__(self, name: str, start: Callable[[], MetricsLogger]) -> None:
        self._name = name
        self._added = self._passed = 0
        self._failing = False
        self._flushing = threading.Lock()
        self._logger: MetricsLogger | None = None
        try:
            self._logger = start()
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of metrics; never waits."""
        self._added += 1
        if logger := self._logger:  # another thread may give it up
            try:
                logger.add(line)
            except Exception as error:  # noqa: BLE001
                self._fail(error)
                self._logger = None  # it lacks this line, which a later flush would not tell

    def flush(self, to_disk: bool = False) -> None:
        """Passes on the lines that were added, if the logger works."""
        with self._flushing:
            logger, added = self._logger, self._added
            if logger is None:
                return
            try:
                logger.flush(to_disk)
            except Exception as error:  # noqa: BLE001
                self._fail(error)
                if added - self._passed > _MOST_KEPT:
                    self._logger = None
                return
            if self._logger is None:  # it failed to take a line meanwhile
                return
            if self._failing:
                get_logger().info("%s gets metrics again; no line is missing", self._name)
            self._failing, self._passed = False, added

    def close(self) -> None:
        """Ends the logger; logs the number of lines that it did not get."""
        if self._logger:
            try:
                self._logger.close()
            except Exception as error:  # noqa: BLE001
                self._fail(error)
        if self._failing:
            missing = self._added - self._passed
            get_logger().warning("%s lacks the last lines of metrics (%d or more)", self._name, missing)

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            text = f"{type(error).__name__}: {error}"
            reason = error.strerror or error if isinstance(error, OSError) else text
            get_logger().warning("%s gets no metrics now (%s); metrics.jsonl has all of them", self._name, reason)
        self._failing = True


def tags(line: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line of metrics by the tag that loggers show, `kind/name`; without those that are None."""
    named = {f"{line['kind']}/{name}": value for name, value in line.items() if name not in _NOT_SHOWN}
    return {tag: value for tag, value in named.items() if value is not None}
