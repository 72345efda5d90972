"""Copies of folders of an object store, replaced as a whole or not at all, and the list of their files with checksums.

Next to a copy FOLDER, `.FOLDER.pulled` lists the files that were fetched. So the next `pull` can tell a file that it
may replace from one that a user created or changed.

The list is written last and marks the folder as complete. Functions with an address raise RemoteError if the store
refuses, or did not answer within the time of `retries`.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unicodedata import category

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import excerpt
from declutr.common.storage import atomic_folder, hash_file, put_back, write_text
from declutr.common.stores.address import child
from declutr.common.stores.files import entries, fetch_file, read_file
from declutr.common.stores.retry import DEFAULT_RETRIES, AlteredError, RemoteError, RetryPolicy

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


PLAN = "plan.json"
"""The first file of a preparation's output."""
_FETCHES = 8  # parallel fetches, because a store limits the speed of each stream


def pull_all(url: str, local: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> int:
    """Fetches everything at an address, then replaces the earlier copy; unchanged files are not fetched again.

    Returns the number of files fetched.

    The address names a folder that was sent whole, or a folder of such folders and further files, like a run. `local`
    is new, empty, or an unchanged copy that `pull` made.

    Raises:
        FileNotFoundError: nothing exists at that address.
        AlteredError: a remote file is missing, altered, or has a name that is not allowed here.
        RemoteError: a preparation into that address is unfinished, `local` holds other files, the store refuses, or it
            did not answer in time.
    """
    local = Path(os.path.realpath(local))
    if local.is_mount():
        raise RemoteError(f"{local} is a mount point, which cannot be replaced; name a folder in it")
    wanted = tree(url, retries)
    if not wanted:
        raise FileNotFoundError(f"{url}: nothing found; check the address")
    if wanted.get(PLAN, wanted) is None:  # there, and in no list; the list of a finished output names it
        raise RemoteError(
            f"{url} holds an unfinished preparation, so nothing was fetched; repeat its `declutr prepare`, or delete it"
        )
    local.parent.mkdir(parents=True, exist_ok=True)
    mark = local.with_name(f".{local.name}.pulled")
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        put_back(local)
        stamps = _stamps(local)
        here = _replaceable(local, mark, wanted)
        new = [name for name, record in wanted.items() if record is None or here.get(name) != record]
        if here != wanted:
            get_logger().info("fetching %d of %d files from %s", len(new), len(wanted), url)
            with atomic_folder(local, replace=True) as aside:
                here = fetch_all(url, wanted, aside, retries, local, here)
                if _stamps(local) != stamps:
                    raise RemoteError(f"{local} changed during the fetch and was not replaced; name a new folder")
        write_text(mark, encoded(here).decode())
    return len(new)


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and modification time of everything in a folder except its subfolders."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (at.st_size, at.st_mtime_ns) for path, at in found if not stat.S_ISDIR(at.st_mode)}


def _replaceable(local: Path, mark: Path, wanted: Mapping[str, FileRecord | None]) -> dict[str, FileRecord]:
    """The files of a folder that may be replaced without losing a user's file.

    Raises:
        RemoteError: it is not a folder, or it holds files that `pull` did not fetch.
    """
    if not local.exists():
        return {}
    if not local.is_dir():
        raise RemoteError(f"{local} is a file; name a folder")
    foreign = [
        path.relative_to(local).as_posix()
        for path in sorted(local.rglob("*"))
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode))
    ]
    here = records(local) if not foreign else {}
    fetched = decoded(mark.read_bytes(), str(mark)) if mark.is_file() else {}
    foreign += [name for name, record in here.items() if record not in (fetched.get(name), wanted.get(name))]
    if foreign:
        raise RemoteError(
            f"{local} holds files that `declutr pull` did not fetch, or that have changed since: {excerpt(foreign)}. "
            "Nothing was fetched or deleted: name a new folder, or delete this one yourself"
        )
    return here


def fetch_all(
    url: str,
    wanted: Mapping[str, FileRecord | None],
    aside: Path,
    retries: RetryPolicy,
    before: Path | None = None,
    here: Mapping[str, FileRecord] | None = None,
) -> dict[str, FileRecord]:
    """Fetches the wanted files of a folder to `aside`, several at a time; returns the files that it holds now.

    The record of a wanted file is None if its size and checksum are unknown. Files that an earlier copy, `before`,
    already has are linked instead of fetched; `here` has the records of its files.

    Raises:
        AlteredError: a file is missing or differs from its list.
        RemoteError: the store refuses, or did not answer in time.
    """

    def fetch(name: str) -> FileRecord:
        target, expected = aside / name, wanted[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is not None and here is not None and expected is not None and here.get(name) == expected:
            target.hardlink_to(before / name)
            return expected
        found = FileRecord(*fetch_file(child(url, name), target, retries))
        if expected is not None and found != expected:
            raise AlteredError(f"{child(url, name)} is truncated or altered (checksum differs)")
        return found

    with ThreadPoolExecutor(_FETCHES) as pool:
        return dict(zip(wanted, pool.map(fetch, wanted), strict=True))
