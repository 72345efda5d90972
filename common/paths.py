"""Paths as a person names them: `~` and `$VARIABLES` expanded, and what is wrong with them, seen before any work."""

import argparse
import os
import re
import tempfile
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")
_NEARLY_AN_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:(?:\\|/(?!/))")


class PathError(ValueError):
    """A path that names no place on this machine."""


def expand(path: str) -> Path:
    """A user's path with `~` and `$VARIABLES` expanded; a name that exists as it is written is left alone.

    Raises:
        PathError: it is empty, begins as an address with one slash or a path of Windows does, or names a variable or a
            user that there is not.
    """
    if not path.strip():
        raise PathError("an empty path; name a file or a folder")
    if "\0" in path:
        raise PathError(f"{path!r} holds a NUL character")
    if os.path.lexists(path):
        return Path(path)
    if _NEARLY_AN_ADDRESS.match(path):
        raise PathError(
            f"{path!r} is neither an address (protocol://bucket/name, with two slashes) nor a path of this machine; "
            f"write ./{path} if a folder has that name"
        )
    expanded = str(expand_known(path))
    if unset := _VARIABLE.search(expanded):
        raise PathError(f"{path!r}: {unset[0]} is not set")
    if expanded.startswith("~"):
        who = expanded.partition("/")[0]
        raise PathError(f"{path!r}: there is no home folder {who}; write the path out")
    return Path(expanded)


def expand_known(path: str) -> Path:
    """The path with `~` and those `$VARIABLES` expanded that this machine has; the others may be set on another."""
    return Path(os.path.expanduser(os.path.expandvars(path)))  # noqa: PTH111 - Path.expanduser raises RuntimeError


def path_argument(text: str) -> Path:
    """A path on a command line, expanded where the shell has not done it (`--output=~/x`)."""
    try:
        return expand(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def folder_problem(folder: Path) -> str | None:
    """The reason why a folder cannot be made or written to; None where it can. Nothing is left behind by the look.

    Asked of the system itself, by a folder that is made and removed: permissions alone say nothing of /proc, of
    read-only disks and of quotas.
    """
    place = folder.absolute()
    try:
        while not _is_there(place):
            place = place.parent
        if not place.is_dir():
            return f"{place} is {'a link to nothing' if place.is_symlink() else 'a file'}; name a folder"
        Path(tempfile.mkdtemp(prefix=".declutr-", dir=place)).rmdir()
    except OSError as error:
        return f"nothing can be written in {place} ({error.strerror})"
    return None


def _is_there(path: Path) -> bool:
    """Whether a name is taken, if only by a link to nothing.

    Raises:
        OSError: it is too long, or may not be looked up.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
