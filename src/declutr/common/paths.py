"""Paths as users write them: `~` and `$VARIABLES` expanded, and problems found before any work."""

import argparse
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from glob import has_magic
from itertools import islice
from pathlib import Path

from declutr.common.errors import UsageError, nearest

_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")
LONGEST_NAME = 255  # in bytes, of a file on Linux
_NEIGHBOURS = 1000  # names of a folder that a suggestion is chosen from
_NEARLY_AN_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:(?:\\|/(?!/))")


def expand(path: str | os.PathLike[str], setting: str = "path") -> Path:
    """Expands `~` and `$VARIABLES` in a user's path; a path that exists as written is not changed."""
    if not isinstance(path, str | os.PathLike):  # of Python; as a text, None would be a name
        raise UsageError(f"{setting} = {path!r}: name a file or a folder")
    path = os.fspath(path)
    if not path.strip():
        raise UsageError("an empty path; name a file or a folder")
    if "\0" in path:
        raise UsageError(f"{path!r} holds a NUL character")
    if any("\ud800" <= letter <= "\udfff" for letter in path):
        raise UsageError(f"{path!r}: the name is not UTF-8; use another one")
    if any(len(part.encode()) > LONGEST_NAME for part in path.split("/")):
        raise UsageError(f"{path[:40]!r}...: {len(path):,} characters are no path; name a file or a folder")
    if os.path.lexists(path):  # a broken link exists, too
        return Path(path)
    if _NEARLY_AN_ADDRESS.match(path):
        raise UsageError(
            f"{path!r} is neither an address (protocol://bucket/name, with two slashes) nor a path of this machine; "
            f"write ./{path} if a folder has that name"
        )
    expanded = str(expand_known(path))
    if unset := _VARIABLE.search(expanded):
        raise UsageError(f"{path!r}: {unset[0]} is not set")
    if expanded.startswith("~"):
        who = expanded.partition("/")[0]
        raise UsageError(f"{path!r}: no home folder {who} exists; write the full path")
    return Path(expanded)


def listed(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """One path or several, as Python gives them, as a list of strings."""
    try:
        return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    except TypeError as error:
        raise UsageError(f"{str(paths)[:80]}: {error}; name a file or folder, or a list of them") from error


def expand_known(path: str) -> Path:
    """Expands `~` and the `$VARIABLES` that are set on this machine; others may be set on another machine."""
    return Path(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111 - Path.expanduser raises RuntimeError


def path_argument(text: str) -> Path:
    """A path from a command line, expanded if the shell has not done it (`--output=~/x`)."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is an address; name a path of this machine")
    try:
        return expand(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_there(paths: Iterable[str | os.PathLike[str] | None]) -> None:
    """Checks that paths of a command line exist, before libraries load; addresses and globs are for their readers."""
    problems = []
    for path in (os.fspath(path) for path in paths if path):
        if "://" in path or has_magic(path) or os.path.lexists(place := expand(path)):
            continue
        near = None
        with suppress(OSError):
            near = nearest(place.name, [other.name for other in islice(place.parent.iterdir(), _NEIGHBOURS)])
        hint = f"; did you mean `{Path(path).parent / near}`?" if near else ""
        problems.append(f"{path}: no such file or folder{hint}")
    if problems:
        raise UsageError("\n".join(problems))


def folder_problem(folder: Path) -> str | None:
    """The reason why a folder cannot be created or written to; None if it can.

    Creates and removes a temporary folder, because permissions alone do not show /proc, read-only disks and quotas.
    """
    place = folder.absolute()
    try:
        while place.name:  # the root exists
            try:
                place.lstat()  # a broken link exists, too; a name that is too long or may not be looked up is an error
                break
            except (FileNotFoundError, NotADirectoryError):
                place = place.parent
        if not place.is_dir():
            return f"{place} is {'a file' if place.exists() else 'a link to nothing'}; name a folder"
        Path(tempfile.mkdtemp(prefix=".declutr-", dir=place)).rmdir()
    except OSError as error:
        return f"nothing can be written in {place} ({error.strerror})"
    return None
