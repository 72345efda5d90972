"""Files that are either whole or absent (write aside, fsync, rename), hashes of contents, and records as JSON.

The list of a folder's files with their SHA-256 and sizes is sent last to a store, and marks a folder there as complete.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

import msgspec

from declutr.common.errors import AlteredError, DamagedError

LISTING = ".files.json"  # name of the list of a folder's files, in the folder
_DRIVE = re.compile(r"[A-Za-z]:")  # a folder of another disk on Windows

Record = TypeVar("Record")


def fsync_path(path: Path) -> None:
    """Forces a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `path` to write a file to; it takes the name `path` only if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write the same file
    try:
        yield aside
        fsync_path(aside)  # before it has its name, or a power failure could leave an empty file of that name
        aside.replace(path)
        fsync_path(path.parent)  # the name is on disk, too, when the call returns
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(
    path: Path,  # final name of the folder
    # replaces an existing folder of that name when the new one is whole. A kill between the two renames leaves the old
    # one as a hidden sibling, which the next call restores.
    replace: bool = False,
) -> Iterator[Path]:
    """Yields an empty temporary sibling folder of `path`; it takes the name `path` only if the block succeeds."""
    if path.exists() and not replace:
        raise FileExistsError(f"{path} exists already")
    aside, before = path.with_name(f".{path.name}.{os.getpid()}.tmp"), _before(path)
    if replace:
        put_back(path)  # of a call that was killed between its renames
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in sorted(aside.rglob("*")):
            fsync_path(file)
        fsync_path(aside)
        if replace and path.exists():
            path.rename(before)
        aside.rename(path)
        fsync_path(path.parent)  # before the old folder is deleted
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if replace:
            put_back(path)  # of an error between the two renames
            shutil.rmtree(before, ignore_errors=True)


def put_back(path: Path) -> None:
    """Restores a folder that was moved aside for a replacement that never came."""
    if not path.exists() and _before(path).is_dir():
        _before(path).rename(path)


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a whole text file or nothing."""
    with atomic_file(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes a whole JSON file or nothing."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """Reads a file, at most the first `max_bytes` bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))
        return stream.read(max_bytes)


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    try:
        return json.loads(read_regular(path).decode())  # json would guess UTF-16 and UTF-32 from bytes
    except RecursionError as error:
        raise ValueError("values nested too deeply") from error


def set_aside(path: Path) -> Path:
    """Renames a file or folder so that its content is kept; returns the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.kept-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, independent of key order and spacing."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_record(path: Path, kind: type[Record]) -> Record:
    """Reads a JSON file whose content has the type `kind`; keys that a struct does not have are ignored."""
    return decode_record(read_regular(path), kind, str(path))


def decode_record(raw: bytes, kind: type[Record], name: str) -> Record:
    """Like `read_record`, for bytes that were read from the place `name`."""
    if not raw.strip():
        raise DamagedError(f"{name} is damaged: it is empty")
    try:
        return msgspec.json.decode(raw, type=kind)
    # the last two: msgspec, of deep values and of strings that are not UTF-8
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedError(f"{name} is damaged: {error}") from error


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SHA-256 and size of a file."""

    sha256: str
    num_bytes: int


Files = dict[str, FileRecord]  # files of a folder, by name from its address


class _Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: Files


def encoded(files: Files) -> bytes:
    """Encodes a list."""
    return msgspec.json.encode(_Listing(files))


def decoded(raw: bytes, where: str) -> Files:
    """Decodes a list."""
    try:
        files = msgspec.json.decode(raw, type=_Listing).files
    except msgspec.DecodeError as error:
        raise AlteredError(f"{where} is not a list of files: {error}") from error
    refuse_names(files, where)
    return files


def refuse_names(names: Iterable[str], where: str) -> None:
    """Checks names (folders separated by `/`) before any of them is written as a file."""
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
