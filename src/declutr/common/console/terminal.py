"""Output to a terminal: visible control characters (file names may hold escape sequences), short names, refusals."""

import argparse
import functools
import io
import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TextIO, cast

from declutr.common.errors import DeclutrError, RunStoppedError

_CONFIGURED = {
    "prepare": (
        "From a corpus to Arrow shards.",
        {
            "--plan": "estimate documents, tokens, disk and time, then stop",
            "--verify-inputs": "compare every byte of the inputs with finished work, not only times and samples",
        },
    ),
    "train": (
        "From shards to a sentence encoder.",
        {"--plan": "estimate time, memory and the share of tokens that is read"},
    ),
}
"""Descriptions and switches of the commands that read a config file."""


def config_parser(section: str) -> argparse.ArgumentParser:
    """A parser for `CONFIG [key=value ...] [--print-config]`; call `parse_intermixed_args` on it.

    Args:
        section: `prepare` or `train`, the name of the command and of its section in the config file.
    """
    description, switches = _CONFIGURED[section]
    parser = argparse.ArgumentParser(prog=f"declutr {section}", description=description)
    parser.add_argument("config", help=f"YAML file with a `{section}` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--print-config", action="store_true", help="show all settings with meanings and stop")
    for switch, meaning in switches.items():
        parser.add_argument(switch, action="store_true", help=meaning)
    return parser


def refused(reason: object) -> int:
    """Write the reason to stderr; return exit status 1."""
    sys.stderr.write(f"{reason}\n")
    return 1


Arguments = ParamSpec("Arguments")


def answered(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """The command with a sentence on stderr and an exit status in place of an error that is the user's to mend.

    The status is 1, or that of a run that stopped on request, or 130 after Ctrl-C. `DECLUTR_LOG=DEBUG` shows where an
    error came from. Other errors are faults of this code and pass.
    """

    @functools.wraps(command)
    def run(*arguments: Arguments.args, **settings: Arguments.kwargs) -> int:
        try:
            return command(*arguments, **settings)
        except RunStoppedError as reason:
            refused(reason)
            return reason.status
        except (DeclutrError, OSError) as error:
            if os.environ.get("DECLUTR_LOG", "").upper() == "DEBUG":
                traceback.print_exc()
            return refused(error)
        except KeyboardInterrupt:
            refused("stopped; the same command continues")
            return 128 + signal.SIGINT

    return run


def duration(seconds: float) -> str:
    """A time in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def excerpt(names: Sequence[str], max_names: int = 3) -> str:
    """Joins the first `max_names` names with commas and counts the others."""
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def shorten(text: str, max_characters: int) -> str:
    """Cuts a text longer than `max_characters` characters and marks the cut with an ellipsis."""
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


_ALLOWED = frozenset("\n\u200c\u200d\u00ad")
"""Line feed; and the joiners and the soft hyphen, which some scripts and emoji need."""
_OURS = re.compile(r"\A\r+|\x1b\[[0-9;]*m")
"""Control sequences of progress bars and coloured log lines: a leading carriage return, a change of colour."""

_RESET = "\x1b[0m"
"""The colour reset that colorama, which Ray loads, writes to a terminal when a process ends; it is left out."""


def visible(text: str) -> str:
    """Replaces control, format and surrogate characters by their code points, as `⟨U+202E⟩`, and tabs by spaces."""
    return "".join(_visible_character(character) for character in text.replace("\t", "    "))


def _visible_character(character: str) -> str:
    if character in _ALLOWED or unicodedata.category(character) not in {"Cc", "Cf", "Cs"}:
        return character
    return f"⟨U+{ord(character):04X}⟩"


class Wrapper:
    """A text stream around another stream, which handles everything except `write` of a subclass."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text."""
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Shown(Wrapper):
    """A wrapper that makes control characters visible in what is written.

    Args:
        stream: the stream to write to.
        keep_controls: lets the control sequences of progress bars and coloured log lines pass.
    """

    def __init__(self, stream: TextIO, keep_controls: bool) -> None:
        super().__init__(stream)
        self._keep_controls = keep_controls

    def write(self, text: str) -> int:
        """Writes a text with visible control characters."""
        if text == _RESET:
            return len(text)
        kept = _OURS.findall(text) if self._keep_controls else []
        parts = _OURS.split(text) if kept else [text]
        self._stream.write("".join(map("".join, zip(map(visible, parts), [*kept, ""], strict=True))))
        return len(text)


class Piped(_Shown):
    """The wrapper for standard output: when its reader ends, as `head` does, the command ends silently."""

    def write(self, text: str) -> int:
        """Writes a text with visible control characters."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._end()

    def flush(self) -> None:
        """Writes buffered text."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._end()

    def lasting(self) -> TextIO:
        """The same stream for a long command, which continues when its reader ends."""
        return cast(TextIO, _Shown(self._stream, keep_controls=False))

    def _end(self) -> NoReturn:
        """Ends the process with the exit status of SIGPIPE and discards buffered text."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        raise SystemExit(128 + signal.SIGPIPE)


@contextmanager
def shown() -> Iterator[None]:
    """Makes control characters visible in everything that the block writes, for any encoding of the terminal.

    Raises:
        SystemExit: the reader of standard output has ended.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):  # characters that the encoding lacks become \\u2026
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Piped(before[0], keep_controls=False), _Shown(before[1], keep_controls=True)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
