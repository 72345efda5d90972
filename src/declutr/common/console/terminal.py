"""Output to a terminal: visible control characters (file names may hold escape sequences), short names, refusals."""

import argparse
import errno
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
from typing import Any, Literal, NoReturn, ParamSpec, TextIO, cast

from declutr.common.errors import OTHER_WORDS, DeclutrError, RunStoppedError, suggest

_SWITCHES = {
    "prepare": {
        "--plan": "estimate documents, tokens, disk and time, then stop",
        "--verify-inputs": "compare every byte of the inputs with finished work, not only times and samples",
    },
    "train": {"--plan": "estimate time, memory and the share of tokens that is read"},
}
_SUMMARIES = {"prepare": "From a corpus to Arrow shards.", "train": "From shards to a sentence encoder."}


class Parser(argparse.ArgumentParser):
    """A parser that names the option that an unknown one is nearest to."""

    _given: Sequence[str] = ()

    def __init__(self, **settings: Any) -> None:
        # a beginning of an option would be taken for it, unsaid, until a second option begins so
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: Any, **settings: Any) -> Any:
        """Adds as its base does; an argument of any number (`*`) is none that is required."""
        return super().add_argument(
            *names, **({"default": []} | settings if settings.get("nargs") == "*" else settings)
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as its base does."""
        self._given = sys.argv[1:] if args is None else args  # `error` gets a text alone
        for name in (word.partition("=")[0] for word in self._given):  # word processors join two hyphens to a dash
            plain = f"--{name.lstrip('-‐‑‒–—−')}"
            if plain not in (name, f"--{name}") and plain in self._option_string_actions:
                self.error(f"`{name}`: an option begins with two hyphens (--), not with `{name[0]}`; write `{plain}`")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the process with a message."""
        options = [option for option in self._option_string_actions if option not in ("-h", "--help")]
        words = [word.partition("=")[0] for word in self._given if re.match(r"--?[A-Za-z]", word)]
        by_place = {action.dest for action in self._actions if not action.option_strings}
        all_names = by_place | {option.lstrip("-").replace("-", "_") for option in options}
        for word in words if "two hyphens" not in message else []:
            name = word.lstrip("-").replace("-", "_")
            name = own if name not in by_place and (own := OTHER_WORDS.get(name, name)) in all_names else name
            if name in by_place:
                message += f"; {name.upper()} is given by its place, without {word}"
            elif len(name) > 1 and word not in (*options, "--help"):
                message += suggest(f"--{name.replace('_', '-')}", options).replace("; did", f"; {word} is unknown, did")
                if "key=VALUE" not in message and any(action.metavar == "key=value" for action in self._actions):
                    message += "; a setting is written key=VALUE, without dashes"
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists all options\n")


def config_parser(section: str) -> Parser:
    """A parser for `prepare` or `train CONFIG [key=value ...] [--print-config]`; call `parse_intermixed_args` on it."""
    parser = Parser(prog=f"declutr {section}", description=_SUMMARIES[section])
    parser.add_argument("config", help=f"YAML file with a `{section}` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--print-config", action="store_true", help="show all settings with meanings and stop")
    for switch, meaning in _SWITCHES[section].items():
        parser.add_argument(switch, action="store_true", help=meaning)
    if section == "prepare":
        parser.add_argument("--cpus", type=int, metavar="N", help="with --plan: the time on N CPUs as fast as these")
    return parser


def refused(reason: object) -> int:
    """Write the reason to stderr; return exit status 1."""
    sys.stderr.write(f"{reason}\n")
    return 1


Arguments = ParamSpec("Arguments")


def answered(command: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """The command with a sentence on stderr and an exit status in place of an error that is the user's to mend.

    The status is 1, or that of a run that stopped on request, or 128 + signal. `DECLUTR_LOG=DEBUG` shows where an error
    came from. Other errors are faults of this code and pass.
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
            if isinstance(error, OSError) and error.filename and error.strerror:
                return refused(f"{error.filename}: {error.strerror}")  # without a number of the system
            return refused(error)
        except (KeyboardInterrupt, SystemExit) as stopped:
            status = getattr(stopped, "code", 128 + signal.SIGINT)
            if not isinstance(status, int) or status <= 128 or status == 128 + signal.SIGPIPE:
                raise  # a command line that is wrong, or nobody reads any more
            refused("stopped; the same command does the rest")
            return status

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
_BARS = re.compile(r"(\A\r+|\x1b\[[0-9;]*m)")
"""Control sequences of progress bars and coloured log lines: a leading carriage return, a change of colour."""
_RESET = "\x1b[0m"
"""The colour reset that colorama, which Ray loads, writes to a terminal when a process ends; it is left out."""
_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; the terminal was closed


def visible(text: str) -> str:
    """Replaces control, format and surrogate characters by their code points, as `⟨U+202E⟩`, and tabs by spaces."""
    return "".join(
        character
        if character in _ALLOWED or unicodedata.category(character) not in {"Cc", "Cf", "Cs"}
        else f"⟨U+{ord(character):04X}⟩"
        for character in text.replace("\t", "    ")
    )


def _visible_beside_bars(text: str) -> str:
    """Like `visible`, but the control sequences of progress bars and coloured log lines pass."""
    parts = _BARS.split(text)  # those sequences are at the odd places
    return "".join(part if number % 2 else visible(part) for number, part in enumerate(parts))


class Output:
    """A text stream around another one, with safe text and a rule for the end of its reader."""

    def __init__(
        self,
        stream: TextIO,  # the stream to write to
        safe: Callable[[str], str] | None,  # makes a text safe; None leaves it
        # `raise` the error when the reader has ended, `end` the process silently with the exit status of SIGPIPE, as in
        # `declutr search ... | head`, or `drop` further output.
        when_gone: Literal["raise", "end", "drop"],
    ) -> None:
        self._stream, self._safe, self.when_gone = stream, safe, when_gone

    def write(self, text: str) -> int:
        """Writes a text."""
        try:
            if self._safe is None:
                self._stream.write(text)
            elif text != _RESET:
                self._stream.write(self._safe(text))
        except OSError as error:
            self._lost(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes buffered text."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lost(self, error: OSError) -> None:
        """Discards buffered and further text if the reader has ended."""
        if self.when_gone == "raise" or error.errno not in _GONE:
            raise error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())  # else Python's flush at its end fails, too
        os.close(nothing)
        if self.when_gone == "end":
            raise SystemExit(128 + signal.SIGPIPE)


def lasting_streams() -> None:
    """Lets stdout and stderr of this process drop their output when their readers end: `train 2>&1 | head` goes on.

    Characters that their encoding lacks become escapes.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Output):
            stream.when_gone = "drop"
            continue
        if hasattr(stream, "reconfigure"):  # a stream of a test or a notebook may lack it
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Output(stream, None, "drop"))


@contextmanager
def shown() -> Iterator[None]:
    """Makes control characters visible in everything that the block writes, for any encoding of the terminal."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):  # characters that the encoding lacks become \\u2026
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, Output(before[0], visible, "end"))
    sys.stderr = cast(TextIO, Output(before[1], _visible_beside_bars, "raise"))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
