"""Output streams of a long command: neither a reader that ends nor an unencodable character stops the work."""

import errno
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from common.console.terminal import Piped

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; the terminal was closed


class Lasting:
    """A text stream that drops its output when its reader ends: `train 2>&1 | head` trains to the last step.

    Args:
        stream: the stream to write to; it handles everything except `write` and `flush`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text, or drops it if the reader has ended."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno not in _GONE:
            raise error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_streams() -> None:
    """Wraps stdout and stderr of this process in `Lasting`; characters that their encoding lacks become escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Lasting):
            continue
        if isinstance(stream, Piped):
            stream = stream.lasting()
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, cast(TextIO, Lasting(stream)))
