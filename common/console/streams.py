"""Output streams of a long command: neither a reader that ends nor an unencodable character stops the work."""

import errno
import os
import sys
from typing import TextIO, cast

from declutr.common.console.terminal import Piped, Wrapper

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; the terminal was closed


class Lasting(Wrapper):
    """A text stream that drops its output when its reader ends: `train 2>&1 | head` trains to the last step."""

    def write(self, text: str) -> int:
        """Writes a text, or drops it if the reader has ended."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

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
