"""Progress of a long command: a bar in a terminal, one line a minute when the output goes to a file."""

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 60.0
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


def bar(**settings: Any) -> "tqdm[Any]":
    """A progress bar on stderr, or lines there where it is no terminal.

    Args:
        settings: tqdm's arguments except `file`; `bar_format` applies to the bar, not to the lines.
    """
    if sys.stderr.isatty():
        return tqdm(file=sys.stderr, **({"dynamic_ncols": True} | settings))
    return tqdm(file=Lines(), **(settings | {"bar_format": _LINE}))
