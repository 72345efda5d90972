"""The list of a folder's files in an object store with their checksums, and a check of their names.

The list is written last and marks the folder as complete. Functions with an address raise RemoteError if the store
refuses, or did not answer within the time of `retries`.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from unicodedata import category

import msgspec

from declutr.common.storage import hash_file
from declutr.common.stores.address import child
from declutr.common.stores.files import entries, read_file
from declutr.common.stores.retry import AlteredError, RetryPolicy

LISTING = ".files.json"
_DRIVE = re.compile(r"[A-Za-z]:")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The SHA-256 and the size of a file."""

    sha256: str
    num_bytes: int


class _Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, FileRecord]


def encoded(files: dict[str, FileRecord]) -> bytes:
    """Encodes a list."""
    return msgspec.json.encode(_Listing(files))


def decoded(raw: bytes, where: str) -> dict[str, FileRecord]:
    """Decodes a list.

    Raises:
        AlteredError: the content is not such a list, or it names a file that must not be written here.
    """
    try:
        found = msgspec.json.decode(raw, type=_Listing).files
    except msgspec.DecodeError as error:
        raise AlteredError(f"{where} is not a list of files: {error}") from error
    refuse_names(found, where)
    return found


def refuse_names(names: Iterable[str], where: str) -> None:
    """Checks names (folders separated by `/`) before any of them is written as a file.

    Raises:
        AlteredError: a name leads out of its folder on some system, has an empty part or control characters, or uses
            another file as a folder.
    """
    known = set(names)
    for name in sorted(known):
        parts = name.split("/")
        parents = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        leaves = not set(parts).isdisjoint({"", ".", ".."}) or "\\" in name or any(map(_DRIVE.match, parts))
        if leaves or any(category(one) in ("Cc", "Cs") for one in name) or not parents.isdisjoint(known):
            raise AlteredError(f"{where} names a file that is outside the folder or cannot exist in a folder: {name!r}")


def records(folder: Path) -> dict[str, FileRecord]:
    """The files of a folder of this host."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: FileRecord(hash_file(path), path.stat().st_size) for name, path in paths.items()}


def read_listing(url: str, retries: RetryPolicy) -> dict[str, FileRecord] | None:
    """The files of a complete folder; None if its list is missing.

    Raises:
        AlteredError: see `decoded`.
    """
    raw = read_file(child(url, LISTING), retries)
    return None if raw is None else decoded(raw, child(url, LISTING))


def tree(url: str, retries: RetryPolicy) -> dict[str, FileRecord | None]:
    """All files below an address with the records of their lists; None for files in no list.

    Raises:
        AlteredError: a list is invalid, or a name must not be written here.
    """
    listing = read_listing(url, retries)
    if listing is not None:
        return dict(listing)
    found: dict[str, FileRecord | None] = {}
    children = entries(url, retries)
    refuse_names(children, url)
    for name, is_file in children.items():
        if is_file:
            found[name] = None
        else:
            found |= {f"{name}/{below}": record for below, record in tree(child(url, name), retries).items()}
    return found
