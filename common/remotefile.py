"""Files in object stores: sent, fetched, read, with patience where a place is away."""

import contextlib
import hashlib
import posixpath
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from fsspec.implementations.arrow import ArrowFSWrapper

from common.address import filesystem, network_errors
from common.credentials import redact
from common.logs import get_logger
from common.storage import fsync_path, write_aside

_CHUNK_BYTES = 8 * 2**20
# What waiting does not change, in Arrow's words.
_FINAL = (
    "ACCESS_DENIED",
    "NO_SUCH_BUCKET",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "ExpiredToken",
    "To create buckets,",
)
# The cause behind a store's error code, and the remedy; the first that matches.
_REMEDIES = {
    "ExpiredToken": "The credentials have expired: renew them and give the same command again",
    "TOO_SKEWED": "The clock of this host differs too much from the store's: set it",
    "StorageFull": "The store is full: make room there",
    "QuotaExceeded": "The quota of this store is used up: raise it or make room there",
    "HTTP status 507": "The store is full: make room there",
    "SLOW_DOWN": "The store throttles: fewer hosts at a time, or a prefix of its own for this run",
    "HTTP status 503": "The store throttles or is overloaded",
    "ACCESS_DENIED": "Credentials, their rights and this host's clock decide this",
    "INVALID_ACCESS_KEY_ID": "Credentials decide this",
    "SIGNATURE_DOES_NOT_MATCH": "Credentials decide this",
    "NO_SUCH_BUCKET": "Name a bucket that exists",
}

Answer = TypeVar("Answer")


class RemoteError(OSError):
    """A folder that cannot be sent or fetched: what, where, since when, what to do."""


class AlteredError(RemoteError):
    """What lies there is not what was sent: waiting does not help."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a place that is away.

    Attributes:
        total_seconds: after which it is given up.
        first_seconds: before the second try; each further wait is twice as long as the one before.
        longest_seconds: of a wait.
    """

    total_seconds: float = 600.0
    first_seconds: float = 0.5
    longest_seconds: float = 30.0


PATIENT = Patience()


def push_file(local: Path, url: str, patience: Patience = PATIENT) -> None:
    """Sends one file; in an object store the new content is there as a whole or not at all.

    Raises:
        RemoteError: as `push_folder`.
    """
    files, place = _open(url)

    def send() -> None:
        _make_room(files, place)
        files.put_file(str(local), place)

    _persist(url, patience, send)


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

    if not _persist(url, patience, is_file):
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

    return _persist(url, patience, fetch)


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

    return _persist(url, patience, read)


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

    return _persist(url, patience, look)


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
        found = _persist(url, patience, look)
    except NotImplementedError as error:
        raise RemoteError(f"{url}: no time of the last change is kept there") from error
    return None if found is None else found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def write_file(url: str, content: bytes, patience: Patience = PATIENT) -> None:
    """Writes a small file, whole or not at all.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    _persist(url, patience, lambda: _write(files, place, content))


def remove_file(url: str, patience: Patience = PATIENT) -> None:
    """Takes a file away, if it is there.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    _persist(url, patience, lambda: _gone(partial(files.rm_file, place)))


def remove_tree(url: str, patience: Patience = PATIENT) -> None:
    """Takes everything away that lies in a folder, in any order.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)
    _persist(url, patience, lambda: _gone(partial(files.rm, place, recursive=True)))


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

    return _persist(url, patience, look)


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

    return _persist(url, patience, look)


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


def _persist(url: str, patience: Patience, action: Callable[[], Answer]) -> Answer:
    """Does it, again and again while the place is away; one line in the log an outage, one when it is over.

    Raises:
        RemoteError: refused, or away for longer than `patience.total_seconds`.
    """
    began, wait, told = time.monotonic(), patience.first_seconds, False
    while True:
        try:
            with network_errors():
                answer = action()
        except FileNotFoundError as error:
            raise AlteredError(f"{url}: {error}") from error
        except RemoteError:  # judged already
            raise
        except OSError as error:
            if isinstance(error, PermissionError) or any(word in str(error) for word in _FINAL):
                raise RemoteError(f"{url} refuses: {error}{_remedy(error)}") from error
            away = time.monotonic() - began
            if away + wait > patience.total_seconds:
                raise RemoteError(
                    f"{url} has not answered for {away:.0f} s, the last error: {error}{_remedy(error)}"
                ) from error
            if not told:
                told_error = f"{error}{_remedy(error)}"
                get_logger().warning(
                    "%s does not answer (%s); trying again for %.0f s", url, told_error, patience.total_seconds
                )
                told = True
            time.sleep(wait)
            wait = min(2 * wait, patience.longest_seconds)
        else:
            if told:
                get_logger().info("%s answers again, after %.0f s", url, time.monotonic() - began)
            return answer


def _remedy(error: OSError) -> str:
    """The sentence that follows a store's own message; empty where nothing is known."""
    known = (remedy for code, remedy in _REMEDIES.items() if code in str(error))
    return next((f". {remedy}" for remedy in known), "")
