"""The list of a folder's files with their SHA-256 and sizes, which is sent last and marks the folder as complete."""

import re
from collections.abc import Iterable
from pathlib import Path
from unicodedata import category

import msgspec

from declutr.common.errors import AlteredError
from declutr.common.storage import hash_file

LISTING = ".files.json"
"""Name of the list in its folder."""
_DRIVE = re.compile(r"[A-Za-z]:")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The SHA-256 and the size of a file."""

    sha256: str
    num_bytes: int


Files = dict[str, FileRecord]
"""Files of a folder, by name from its address."""


class _Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: Files


def encoded(files: Files) -> bytes:
    """Encodes a list."""
    return msgspec.json.encode(_Listing(files))


def decoded(raw: bytes, where: str) -> Files:
    """Decodes a list.

    Raises:
        AlteredError: the content is not such a list, or it names a file that must not be written here.
    """
    try:
        files = msgspec.json.decode(raw, type=_Listing).files
    except msgspec.DecodeError as error:
        raise AlteredError(f"{where} is not a list of files: {error}") from error
    refuse_names(files, where)
    return files


def refuse_names(names: Iterable[str], where: str) -> None:
    """Checks names (folders separated by `/`) before any of them is written as a file.

    Raises:
        AlteredError: a name leads out of its folder on some system, has an empty part or control characters, or uses
            another file as a folder.
    """
    files = set(names)
    for name in sorted(files):
        parts = name.split("/")
        parents = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        leaves = not set(parts).isdisjoint({"", ".", ".."}) or "\\" in name or any(map(_DRIVE.match, parts))
        if leaves or any(category(letter) in ("Cc", "Cs") for letter in name) or not parents.isdisjoint(files):
            raise AlteredError(f"{where} names a file that is outside the folder or cannot exist in a folder: {name!r}")


def records(folder: Path) -> Files:
    """The files of a folder of this host."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: record_of(path) for name, path in paths.items()}


def record_of(path: Path) -> FileRecord:
    """The record of a file of this host."""
    return FileRecord(hash_file(path), path.stat().st_size)
