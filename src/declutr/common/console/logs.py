"""Logs and progress bars."""

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from declutr.common.console.terminal import lasting_streams, visible


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes each record on a separate line: clears a progress bar on the same stream and redraws it afterwards.

    Escapes control characters, so that file names and texts cannot control the terminal.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):  # else the line would begin behind the bar
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def setup_logging(role: str) -> None:
    """Sends the logs of this process to stderr as `time role level message`. `DECLUTR_LOG=DEBUG` shows more.

    If the reader of its output ends, the process continues and drops further output.
    """
    lasting_streams()
    level = os.environ.get("DECLUTR_LOG", "")
    is_level = level.upper() in logging.getLevelNamesMapping()
    handler = _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("declutr")
    logger.handlers[:] = [handler]  # a second call must not write each line twice
    logger.setLevel(level.upper() if is_level else logging.INFO)
    logger.propagate = False  # nor a handler of the root logger, as other libraries set it
    if level and not is_level:
        logger.warning("DECLUTR_LOG = %s is no level; INFO is used. The others are DEBUG, WARNING and ERROR", level)


def get_logger() -> logging.Logger:
    """The project's logger."""
    return logging.getLogger("declutr")


LINE_SECONDS = 60.0
_NOTEBOOK_COLUMNS = 110
_LINE = "{desc} {percentage:.0f}% ({n_fmt} of {total_fmt}), {elapsed} elapsed, {remaining} left{postfix}"


class Lines:
    """A file object that turns a bar into lines: its newest state once a minute, and its last state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._wrote_at = clock, clock()
        self._newest = self._wrote = ""

    def write(self, text: str) -> None:
        """Takes a state of the bar, which starts with a carriage return, or the newline at its end."""
        self._newest = text.strip() or self._newest
        due = text == "\n" or self._clock() - self._wrote_at >= LINE_SECONDS
        if due and self._newest != self._wrote:
            self._wrote_at, self._wrote = self._clock(), self._newest
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {self._newest}\n")
            sys.stderr.flush()

    def flush(self) -> None:
        """Accepts the call; a line is flushed when it is written."""


def bar(
    **settings: Any,  # tqdm's arguments except `file` and `disable`; `bar_format` applies to the bar, not to the lines
) -> "tqdm[Any]":
    """A progress bar on stderr in a terminal and a notebook, elsewhere lines; nothing if the logger shows no INFO."""
    settings["disable"] = get_logger().level > logging.INFO
    if sys.stderr.isatty():
        return tqdm(file=sys.stderr, **({"dynamic_ncols": True} | settings))
    if type(sys.stderr).__module__ == "ipykernel.iostream":  # each update is a message to the browser
        return tqdm(file=sys.stderr, ncols=_NOTEBOOK_COLUMNS, mininterval=1.0, **settings)
    return tqdm(file=Lines(), **(settings | {"bar_format": _LINE}))


def input_bar(total: int, initial: int, stage: str) -> "tqdm[Any]":
    """A bar of the bytes of an input that are done."""
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} of input, {remaining} left{postfix}"
    return bar(total=total, initial=initial, desc=stage, unit="B", unit_scale=True, unit_divisor=1024, bar_format=form)
