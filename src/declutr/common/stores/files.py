"""Files in object stores: send, fetch, read and remove, with retries while a store does not answer.

Every function raises RemoteError if the store refuses, or did not answer within the time of `retries`.
"""

import contextlib
import hashlib
import posixpath
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from fsspec.implementations.arrow import ArrowFSWrapper

from declutr.common.credentials import redact
from declutr.common.storage import atomic_file, fsync_path
from declutr.common.stores.address import filesystem, network_errors
from declutr.common.stores.retry import (
    DEFAULT_RETRIES,
    AlteredError,
    Answer,
    RemoteError,
    RetryPolicy,
    explained,
    with_retries,
)

_CHUNK_BYTES = 8 * 2**20


def push_file(local: Path, url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Sends one file; an object store shows the new content as a whole or not at all."""

    def send(files: Any, place: str) -> None:
        if not isinstance(files, ArrowFSWrapper):
            _make_room(files, place)
            files.put_file(str(local), place)
            return
        # `put_file` would also ask for the bucket and write a marker of the folder: three requests instead of one.
        try:
            with local.open("rb") as source, files.open(place, "wb") as target:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
        except (KeyboardInterrupt, SystemExit):  # leaving the block has completed an object of what was sent so far
            with contextlib.suppress(OSError):
                files.rm_file(place)
            raise

    _act(url, retries, send)


def write_file(url: str, content: bytes, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Writes a small file, whole or not at all."""

    def write(files: Any, place: str) -> None:
        _make_room(files, place)
        files.pipe_file(place, content)

    _act(url, retries, write)


def pull_file(url: str, local: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> bool:
    """Fetches one file and replaces the local one; returns False if the remote file does not exist."""
    if not _ask(url, retries, lambda files, place: bool(files.info(place)["type"] == "file")):
        return False
    with atomic_file(local) as aside:
        fetch_file(url, aside, retries)
    return True


def fetch_file(url: str, target: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> tuple[str, int]:
    """Copies one file to a temporary place; returns the SHA-256 and the size in bytes of the copy.

    Raises:
        AlteredError: the file is missing.
    """

    def fetch(files: Any, place: str) -> tuple[str, int]:
        digest, num_bytes = hashlib.sha256(), 0
        with _own_disk(target):
            # Without a buffer, which would be written again on closing and fail as the store's error.
            stream = target.open("wb", buffering=0)
        with stream, files.open(place, "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                with _own_disk(target):
                    while chunk:
                        chunk = chunk[stream.write(chunk) :]
        with _own_disk(target):
            fsync_path(target)
        return digest.hexdigest(), num_bytes

    return _act(url, retries, fetch)


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
    """Content of a small file; None if it does not exist."""

    def read(files: Any, place: str) -> bytes:
        with files.open(place, "rb") as stream:
            return bytes(stream.read())

    return _ask(url, retries, read)


def size_of(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> int | None:
    """Size of a file in bytes; None if it does not exist."""
    return _ask(url, retries, lambda files, place: cast(int, files.info(place)["size"]))


def modified(url: str) -> float | None:
    """Modification time of a file in Unix seconds of the store's clock; None if the file does not exist.

    Raises:
        RemoteError: also if the store keeps no such time.
    """
    try:
        found = _ask(url, DEFAULT_RETRIES, lambda files, place: cast(datetime, files.modified(place)))
    except NotImplementedError as error:
        raise RemoteError(f"{url}: this store keeps no modification times") from error
    return None if found is None else found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def remove_file(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Removes a file if it exists."""
    _ask(url, retries, lambda files, place: files.rm_file(place))


def remove_tree(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Removes everything in a folder, in any order."""
    _ask(url, retries, lambda files, place: files.rm(place, recursive=True))


def names(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> list[str]:
    """Sorted names of the files and folders directly in a folder; none if the folder does not exist."""
    found = _ask(url, retries, lambda files, place: files.ls(place, detail=False))
    return sorted(posixpath.basename(str(name).rstrip("/")) for name in found or ())


def entries(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> dict[str, bool]:
    """Sorted names directly in a folder, True for files and False for folders; none if the folder does not exist.

    A store may have keys with an empty part, whose name is then empty.

    Raises:
        AlteredError: an entry is neither a file nor a folder.
    """

    def look(files: Any, place: str) -> dict[str, bool]:
        kinds = {str(one["name"]).rstrip("/"): str(one["type"]) for one in files.ls(place, detail=True)}
        kinds = {"" if name == place.rstrip("/") else posixpath.basename(name): kind for name, kind in kinds.items()}
        if strange := {name: kind for name, kind in kinds.items() if kind not in ("file", "directory")}:
            raise AlteredError(f"{url}: these entries are neither files nor folders: {strange}")
        return {name: kinds[name] == "file" for name in sorted(kinds)}

    return _ask(url, retries, look) or {}


def sizes(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> dict[str, int]:
    """Sizes in bytes of all files below a folder, by name from there; none if the folder does not exist."""

    def look(files: Any, place: str) -> dict[str, int]:
        root = place.rstrip("/") + "/"
        return {name.removeprefix(root): int(one["size"]) for name, one in files_below(files, place).items()}

    return _ask(url, retries, look) or {}


def files_below(files: Any, folder: str, levels: int | None = None) -> dict[str, dict[str, Any]]:
    """Facts of all files below a folder by name; fsspec's `find` and `glob` leave out folders that cannot be listed.

    Args:
        files: the file system.
        folder: path in it; none are found if it does not exist.
        levels: levels of folders to look into, 1: the folder alone; None: all.

    Raises:
        OSError: a folder cannot be listed.
    """
    found, waiting = dict[str, dict[str, Any]](), [(folder, 1)]
    while waiting:
        here, level = waiting.pop()
        try:
            inside = files.ls(here, detail=True)
        except FileNotFoundError:  # removed meanwhile
            continue
        for one in inside:
            name = str(one["name"])
            if one["type"] == "file":
                found[name] = one
            elif name.rstrip("/") != here.rstrip("/") and level != levels:
                waiting.append((name, level + 1))
    return found


def _act(url: str, retries: RetryPolicy, action: Callable[[Any, str], Answer]) -> Answer:
    """Runs an action on the file system of an address and the path in it.

    Raises:
        RemoteError: also if the protocol is unknown, or its library is not installed.
    """
    try:
        with network_errors():
            files, place, _ = filesystem(url)
    except OSError as error:
        raise RemoteError(f"{redact(url)}: {explained(error)}") from error
    return with_retries(url, retries, lambda: action(files, place))


def _ask(url: str, retries: RetryPolicy, action: Callable[[Any, str], Answer]) -> Answer | None:
    """Runs an action like `_act`, without earlier listings; None if the file or folder does not exist."""

    def look(files: Any, place: str) -> Answer | None:
        files.invalidate_cache()
        try:
            return action(files, place)
        except FileNotFoundError:
            return None

    return _act(url, retries, look)


def _make_room(files: Any, place: str) -> None:
    """Creates the folder of a file; skipped for object stores, which have none and need a request a part."""
    if not isinstance(files, ArrowFSWrapper):
        files.makedirs(posixpath.dirname(place), exist_ok=True)
