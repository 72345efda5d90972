"""Output that a terminal shows and never obeys: texts of a corpus and names of files may hold escape sequences."""

import io
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO, cast

_ALLOWED = frozenset("\n\u200c\u200d\u00ad")
"""Line feed; the joiners and the soft hyphen are part of how some scripts and emoji are written."""
_OURS = re.compile(r"\A\r+|\x1b\[[0-9;]*m")
"""Signs of progress bars and coloured log lines: a return at the beginning, a change of colour."""


def visible(text: str) -> str:
    """The text with control, format and surrogate characters as their code points, `⟨U+202E⟩`; tabs as spaces."""
    return "".join(_shown(character) for character in text.replace("\t", "    "))


def _shown(character: str) -> str:
    if character in _ALLOWED or unicodedata.category(character) not in {"Cc", "Cf", "Cs"}:
        return character
    return f"⟨U+{ord(character):04X}⟩"


class _Shown:
    """A stream that makes control characters visible. Everything but writing is the stream's own.

    Args:
        stream: to write to.
        ours: lets through what progress bars and coloured log lines are made of.
    """

    def __init__(self, stream: TextIO, ours: bool) -> None:
        self._stream, self._ours = stream, ours

    def write(self, text: str) -> int:
        """Writes a text, made visible."""
        kept = _OURS.findall(text) if self._ours else []
        parts = _OURS.split(text) if kept else [text]
        self._stream.write("".join(map("".join, zip(map(visible, parts), [*kept, ""], strict=True))))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Piped(_Shown):
    """The same for standard output: where its reader has gone, as `head` does, the command ends without a word."""

    def write(self, text: str) -> int:
        """Writes a text, made visible."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._end()

    def flush(self) -> None:
        """Writes what is held."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._end()

    def lasting(self) -> TextIO:
        """The same stream for a long command, which a reader's end does not end (common/console/streams.py)."""
        return cast(TextIO, _Shown(self._stream, ours=False))

    def _end(self) -> NoReturn:
        """Ends the process with the status of one that SIGPIPE ended; what is still held is thrown away."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE)


@contextmanager
def shown() -> Iterator[None]:
    """Within this, nothing that is written to a terminal steers it, whatever encoding the terminal has.

    Raises:
        SystemExit: the reader of standard output has ended.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):  # characters that the encoding lacks become \\u2026
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Piped(before[0], ours=False), _Shown(before[1], ours=True)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
