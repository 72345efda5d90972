"""Files in object stores: sent, fetched, read, with patience where a place is away."""

import contextlib
import hashlib
import posixpath
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from fsspec.implementations.arrow import ArrowFSWrapper

from common.credentials import redact
from common.storage import fsync_path, write_aside
from common.stores.address import filesystem, network_errors
from common.stores.patience import PATIENT, AlteredError, Patience, RemoteError, persist

_CHUNK_BYTES = 8 * 2**20


def push_file(local: Path, url: str, patience: Patience = PATIENT) -> None:
    """Sends one file; in an object store the new content is there as a whole or not at all.

    Raises:
        RemoteError: as `push_folder`.
    """
    files, place = _open(url)

    def send() -> None:
        _make_room(files, place)
        files.put_file(str(local), place)

    persist(url, patience, send)


def pull_file(url: str, local: Path, patience: Patience = PATIENT) -> bool:
    """Fetches one file in place of what is here; answers whether it is there.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def is_file() -> bool:
        try:
            return bool(files.info(place)["type"] == "file")
        except FileNotFoundError:
            return False

    if not persist(url, patience, is_file):
        return False
    with write_aside(local) as aside:
        fetch_file(url, aside, patience)
    return True


def fetch_file(url: str, target: Path, patience: Patience = PATIENT) -> tuple[str, int]:
    """Copies one file to where nobody looks yet; SHA-256 and size in bytes of what arrived.

    Raises:
        RemoteError: it is not there, the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def fetch() -> tuple[str, int]:
        digest, num_bytes = hashlib.sha256(), 0
        with files.open(place, "rb") as source, target.open("wb") as stream:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                with _own_disk(target):
                    stream.write(chunk)
                    stream.flush()
                num_bytes += len(chunk)
        with _own_disk(target):
            fsync_path(target)
        return digest.hexdigest(), num_bytes

    return persist(url, patience, fetch)


@contextlib.contextmanager
def _own_disk(target: Path) -> Iterator[None]:
    """Errors of the disk of this host, which are not the store's: waiting for the store does not help."""
    try:
        yield
    except OSError as error:
        raise RemoteError(
            f"{target} cannot be written on this host ({error.strerror}): make room, and give the same command again"
        ) from error


def read_file(url: str, patience: Patience = PATIENT) -> bytes | None:
    """A small file; None if it is not there.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def read() -> bytes | None:
        try:
            with files.open(place, "rb") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    return persist(url, patience, read)


def size_of(url: str, patience: Patience = PATIENT) -> int | None:
    """Bytes of a file; None if it is not there.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def look() -> int | None:
        files.invalidate_cache()
        try:
            return cast(int, files.info(place)["size"])
        except FileNotFoundError:
            return None

    return persist(url, patience, look)


def modified(url: str, patience: Patience = PATIENT) -> float | None:
    """When a file was last written, in Unix seconds of the place's own clock; None if it is not there.

    Raises:
        RemoteError: the place refuses, did not answer in time, or keeps no such time.
    """
    files, place = _open(url)

    def look() -> datetime | None:
        files.invalidate_cache()
        try:
            return cast(datetime, files.modified(place))
        except FileNotFoundError:
            return None

    try:
        found = persist(url, patience, look)
    except NotImplementedError as error:
        raise RemoteError(f"{url}: no time of the last change is kept there") from error
    return None if found is None else found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def write_file(url: str, content: bytes, patience: Patience = PATIENT) -> None:
    """Writes a small file, whole or not at all.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    persist(url, patience, lambda: _write(files, place, content))


def remove_file(url: str, patience: Patience = PATIENT) -> None:
    """Takes a file away, if it is there.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    persist(url, patience, lambda: _gone(partial(files.rm_file, place)))


def remove_tree(url: str, patience: Patience = PATIENT) -> None:
    """Takes everything away that lies in a folder, in any order.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    persist(url, patience, lambda: _gone(partial(files.rm, place, recursive=True)))


def _gone(remove: Callable[[], None]) -> None:
    with contextlib.suppress(FileNotFoundError):  # an earlier try did it
        remove()


def names(url: str, patience: Patience = PATIENT) -> list[str]:
    """Names of the files and folders directly in a folder, in order; none if there is no such folder.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def look() -> list[str]:
        files.invalidate_cache()
        try:
            found = files.ls(place, detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(str(name).rstrip("/")) for name in found)

    return persist(url, patience, look)


def entries(url: str, patience: Patience = PATIENT) -> dict[str, bool]:
    """Names directly in a folder, in order, each with whether it is a file; none if there is no such folder.

    A store may have keys with an empty part: that part's name is empty.

    Raises:
        AlteredError: something there is neither a file nor a folder.
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def look() -> dict[str, bool]:
        files.invalidate_cache()
        try:
            found = files.ls(place, detail=True)
        except FileNotFoundError:
            return {}
        kinds = {str(one["name"]).rstrip("/"): str(one["type"]) for one in found}
        kinds = {"" if name == place.rstrip("/") else posixpath.basename(name): kind for name, kind in kinds.items()}
        if strange := {name: kind for name, kind in kinds.items() if kind not in ("file", "directory")}:
            raise AlteredError(f"{url}: neither files nor folders are {strange}")
        return {name: kinds[name] == "file" for name in sorted(kinds)}

    return persist(url, patience, look)


def _open(url: str) -> tuple[Any, str]:
    """File system and path in it.

    Raises:
        RemoteError: no such protocol, or what it needs is not installed.
    """
    try:
        with network_errors():
            files, place, _ = filesystem(url)
    except OSError as error:
        raise RemoteError(f"{redact(url)}: {error}") from error
    return files, place


def _write(files: Any, place: str, content: bytes) -> None:
    _make_room(files, place)
    files.pipe_file(place, content)


def _make_room(files: Any, place: str) -> None:
    """Makes the folder of a file; a store has none, and would be asked for each part of the path."""
    if not isinstance(files, ArrowFSWrapper):
        files.makedirs(posixpath.dirname(place), exist_ok=True)
