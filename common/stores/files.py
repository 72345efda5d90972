"""Files in object stores: send, fetch, read and remove, with retries while a store does not answer."""

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
from common.stores.retry import DEFAULT_RETRIES, AlteredError, RemoteError, RetryPolicy, with_retries

_CHUNK_BYTES = 8 * 2**20


def push_file(local: Path, url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Sends one file; an object store shows the new content as a whole or not at all.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)

    def send() -> None:
        _make_room(files, place)
        files.put_file(str(local), place)

    with_retries(url, retries, send)


def pull_file(url: str, local: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> bool:
    """Fetches one file and replaces the local one; returns False if the remote file does not exist.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)

    def is_file() -> bool:
        try:
            return bool(files.info(place)["type"] == "file")
        except FileNotFoundError:
            return False

    if not with_retries(url, retries, is_file):
        return False
    with write_aside(local) as aside:
        fetch_file(url, aside, retries)
    return True


def fetch_file(url: str, target: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> tuple[str, int]:
    """Copies one file to a temporary place; returns the SHA-256 and the size in bytes of the copy.

    Raises:
        RemoteError: the file is missing, the store refuses, or it did not answer in time.
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

    return with_retries(url, retries, fetch)


@contextlib.contextmanager
def _own_disk(target: Path) -> Iterator[None]:
    """Turns errors of this host's disk into RemoteError, because retrying the store does not help."""
    try:
        yield
    except OSError as error:
        raise RemoteError(
            f"{target} cannot be written on this host ({error.strerror}); free disk space and run the command again"
        ) from error


def read_file(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> bytes | None:
    """Content of a small file; None if it does not exist.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)

    def read() -> bytes | None:
        try:
            with files.open(place, "rb") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    return with_retries(url, retries, read)


def size_of(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> int | None:
    """Size of a file in bytes; None if it does not exist.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)

    def look() -> int | None:
        files.invalidate_cache()
        try:
            return cast(int, files.info(place)["size"])
        except FileNotFoundError:
            return None

    return with_retries(url, retries, look)


def modified(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> float | None:
    """Modification time of a file in Unix seconds of the store's clock; None if the file does not exist.

    Raises:
        RemoteError: the store refuses, did not answer in time, or keeps no such time.
    """
    files, place = _open(url)

    def look() -> datetime | None:
        files.invalidate_cache()
        try:
            return cast(datetime, files.modified(place))
        except FileNotFoundError:
            return None

    try:
        found = with_retries(url, retries, look)
    except NotImplementedError as error:
        raise RemoteError(f"{url}: this store keeps no modification times") from error
    return None if found is None else found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def write_file(url: str, content: bytes, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Writes a small file, whole or not at all.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)
    with_retries(url, retries, lambda: _write(files, place, content))


def remove_file(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Removes a file if it exists.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)
    with_retries(url, retries, lambda: _gone(partial(files.rm_file, place)))


def remove_tree(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Removes everything in a folder, in any order.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)
    with_retries(url, retries, lambda: _gone(partial(files.rm, place, recursive=True)))


def _gone(remove: Callable[[], None]) -> None:
    with contextlib.suppress(FileNotFoundError):  # an earlier attempt removed it
        remove()


def names(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> list[str]:
    """Sorted names of the files and folders directly in a folder; none if the folder does not exist.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
    """
    files, place = _open(url)

    def look() -> list[str]:
        files.invalidate_cache()
        try:
            found = files.ls(place, detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(str(name).rstrip("/")) for name in found)

    return with_retries(url, retries, look)


def entries(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> dict[str, bool]:
    """Sorted names directly in a folder, True for files and False for folders; none if the folder does not exist.

    A store may have keys with an empty part, whose name is then empty.

    Raises:
        AlteredError: an entry is neither a file nor a folder.
        RemoteError: the store refuses, or did not answer in time.
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
            raise AlteredError(f"{url}: these entries are neither files nor folders: {strange}")
        return {name: kinds[name] == "file" for name in sorted(kinds)}

    return with_retries(url, retries, look)


def _open(url: str) -> tuple[Any, str]:
    """File system and path in it.

    Raises:
        RemoteError: the protocol is unknown, or its library is not installed.
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
    """Creates the folder of a file; skipped for object stores, which have none and need a request a part."""
    if not isinstance(files, ArrowFSWrapper):
        files.makedirs(posixpath.dirname(place), exist_ok=True)
