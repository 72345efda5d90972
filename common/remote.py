"""Folders in object stores: sent whole, fetched whole, with checksums. What addresses mean, for all readers too.

An object store has no rename. So the list of a folder's files with their SHA-256 is written last: a folder without it,
or whose files do not agree with it, was not sent to its end.
"""

import argparse
import fcntl
import hashlib
import posixpath
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs
from fsspec.core import url_to_fs
from fsspec.implementations.arrow import ArrowFSWrapper

from common.config import expand
from common.logs import get_logger, setup_logging
from common.storage import folder_aside, fsync_path, hash_file

LISTING = ".files.json"
_ARROW_PROTOCOLS = ("s3", "gs", "gcs")
_CHUNK_BYTES = 8 * 2**20
# What waiting does not change, in Arrow's words.
_FINAL = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "To create buckets,")

Answer = TypeVar("Answer")


class RemoteError(OSError):
    """A folder that cannot be sent or fetched: what, where, since when, what to do."""


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


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    num_bytes: int


class _Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, _Record]


def is_remote(path: str) -> bool:
    """Whether a path is an address with a protocol."""
    return "://" in path


def filesystem(address: str) -> tuple[Any, str, str]:
    """File system, path in it, and the options that stood in the address."""
    parts = urlsplit(address)
    if parts.scheme in _ARROW_PROTOCOLS:
        bucket = parts.netloc.rpartition("@")[2]
        return _arrow(parts.scheme, parts.netloc, parts.query), f"{bucket}{parts.path}", parts.query
    files, path = url_to_fs(address)
    return files, path, ""


def address_of(files: Any, name: str, given: str, query: str) -> str:
    """The address of a file of this file system, found under the address `given`."""
    parts = urlsplit(given)
    if parts.scheme in _ARROW_PROTOCOLS:
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return f"{parts.scheme}://{user}{name}{query and '?'}{query}"
    return str(files.unstrip_protocol(name))


def child(address: str, name: str) -> str:
    """The address of what is called `name` in the folder `address`; options of the address stay at its end."""
    place, mark, query = address.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


@lru_cache
def _arrow(scheme: str, netloc: str, query: str) -> ArrowFSWrapper:
    """One connection a process. Credentials and endpoint come from the environment or the address, as in Arrow."""
    files, _ = pa.fs.FileSystem.from_uri(f"{scheme}://{netloc}{query and '?'}{query}")
    return ArrowFSWrapper(files)


@contextmanager
def network_errors() -> Iterator[None]:
    """Turns what the HTTP libraries raise into OSError; they have already tried again where that helps.

    Raises:
        OSError: what they raised, or a protocol that is not known or not installed.
    """
    # Imported here: half a second that only those pay who read from far away.
    from aiohttp import ClientError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The HTTPError of the client that huggingface_hub is built on, whichever it is.
    http_error: type[Exception] = HfHubHTTPError.__mro__[1]
    try:
        yield
    except OSError:
        raise
    except (ClientError, http_error, HFValidationError, pa.ArrowException, ValueError, ImportError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def push_folder(local: Path, url: str, patience: Patience = Patience()) -> None:
    """Sends a folder, its list of files last; files that lie there with the same content are not sent again.

    Args:
        local: the folder. Nothing in it may change meanwhile.
        url: the folder it becomes; whatever else lies there is taken away.
        patience: with a place that does not answer.

    Raises:
        RemoteError: the place refuses, or did not answer in time. What was sent is then no whole folder.
    """
    paths = {path.relative_to(local).as_posix(): path for path in sorted(local.rglob("*")) if path.is_file()}
    new = {name: _Record(hash_file(path), path.stat().st_size) for name, path in paths.items()}
    old = _read_listing(url, patience)
    if old == new:
        return
    files, place = _open(url)
    if old is not None:  # from here on, and until the new list is there, this is no whole folder
        _persist(url, patience, lambda: files.rm_file(f"{place}/{LISTING}"))
    for name, path in paths.items():
        if old is None or old.get(name) != new[name]:
            push_file(path, child(url, name), patience)
    listing = msgspec.json.encode(_Listing(new))
    _persist(url, patience, lambda: _write(files, f"{place}/{LISTING}", listing))
    for name in sorted(set(old or ()) - set(new)):
        _persist(url, patience, partial(files.rm_file, f"{place}/{name}"))


def push_file(local: Path, url: str, patience: Patience = Patience()) -> None:
    """Sends one file; in an object store the new content is there as a whole or not at all.

    Raises:
        RemoteError: as `push_folder`.
    """
    files, place = _open(url)

    def send() -> None:
        files.makedirs(posixpath.dirname(place), exist_ok=True)
        files.put_file(str(local), place)

    _persist(url, patience, send)


def pull_folder(url: str, local: Path, patience: Patience = Patience()) -> None:
    """Fetches a folder; it takes its name when all of it is here and agrees with its checksums.

    Processes of one host that ask for the same folder at the same time fetch it once: the others wait.

    Args:
        url: a folder sent by `push_folder`.
        local: the folder it becomes. If it exists already nothing is done.
        patience: with a place that does not answer.

    Raises:
        FileNotFoundError: there is no whole folder at that address.
        RemoteError: a file is missing or altered, the place refuses, or did not answer in time.
    """
    local.parent.mkdir(parents=True, exist_ok=True)
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if local.exists():
            return
        listing = _read_listing(url, patience)
        if listing is None:
            raise FileNotFoundError(f"{url}: no whole folder is there ({LISTING} is missing)")
        with folder_aside(local) as aside:
            for name, record in listing.items():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                found = _persist(url, patience, partial(_fetch, child(url, name), target))
                if found != record:
                    raise RemoteError(f"{child(url, name)} is truncated or altered (checksum differs)")


def is_whole(url: str, patience: Patience = Patience()) -> bool:
    """Whether a folder was sent there to its end; its files are not read.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    return _read_listing(url, patience) is not None


def names(url: str, patience: Patience = Patience()) -> list[str]:
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


def remove_folder(url: str, patience: Patience = Patience()) -> None:
    """Takes a folder away, its list first: what is left of it if this is stopped is no whole folder.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    files, place = _open(url)

    def remove(path: str, recursive: bool) -> None:
        try:
            files.rm(path, recursive=True) if recursive else files.rm_file(path)
        except FileNotFoundError:  # an earlier try did it
            return

    _persist(url, patience, lambda: remove(f"{place}/{LISTING}", recursive=False))
    _persist(url, patience, lambda: remove(place, recursive=True))


def _open(url: str) -> tuple[Any, str]:
    """File system and path in it.

    Raises:
        RemoteError: no such protocol, or what it needs is not installed.
    """
    try:
        with network_errors():
            files, place, _ = filesystem(url)
    except OSError as error:
        raise RemoteError(f"{url}: {error}") from error
    return files, place


def _read_listing(url: str, patience: Patience) -> dict[str, _Record] | None:
    """Files of a folder; None if its list is not there.

    Raises:
        RemoteError: it is no such list, or names what lies elsewhere.
    """
    files, place = _open(url)

    def read() -> bytes | None:
        try:
            with files.open(f"{place}/{LISTING}", "rb") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    raw = _persist(url, patience, read)
    if raw is None:
        return None
    try:
        found = msgspec.json.decode(raw, type=_Listing).files
    except msgspec.DecodeError as error:
        raise RemoteError(f"{child(url, LISTING)} is no list of files: {error}") from error
    for name in found:
        if name.startswith("/") or not set(name.split("/")).isdisjoint({"", ".", ".."}):
            raise RemoteError(f"{child(url, LISTING)} names a file outside of the folder: {name!r}")
    return found


def _fetch(url: str, target: Path) -> _Record:
    """Copies one file; what arrived is hashed on the way."""
    files, place = _open(url)
    digest, num_bytes = hashlib.sha256(), 0
    with files.open(place, "rb") as source, target.open("wb") as stream:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            stream.write(chunk)
            num_bytes += len(chunk)
    fsync_path(target)
    return _Record(digest.hexdigest(), num_bytes)


def _write(files: Any, place: str, content: bytes) -> None:
    files.makedirs(posixpath.dirname(place), exist_ok=True)
    files.pipe_file(place, content)


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
            raise RemoteError(f"{url}: {error}") from error
        except OSError as error:
            if isinstance(error, PermissionError) or any(word in str(error) for word in _FINAL):
                raise RemoteError(f"{url} refuses: {error}. Credentials and their rights decide this") from error
            away = time.monotonic() - began
            if away + wait > patience.total_seconds:
                raise RemoteError(f"{url} has not answered for {away:.0f} s, the last error: {error}") from error
            if not told:
                get_logger().warning(
                    "%s does not answer (%s); trying again for %.0f s", url, error, patience.total_seconds
                )
                told = True
            time.sleep(wait)
            wait = min(2 * wait, patience.longest_seconds)
        else:
            if told:
                get_logger().info("%s answers again, after %.0f s", url, time.monotonic() - began)
            return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `push FOLDER ADDRESS` or `pull ADDRESS FOLDER`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="remote", description="Folders to and from object stores, whole, with checksums."
    )
    parser.add_argument("direction", choices=("push", "pull"))
    parser.add_argument("source", help="push: a folder; pull: s3://..., gs://... or what else fsspec knows")
    parser.add_argument("target", help="push: s3://...; pull: the folder it becomes; nothing is done if it is there")
    arguments = parser.parse_args(argv)
    setup_logging(arguments.direction)
    try:
        if arguments.direction == "push":
            folder = expand(arguments.source)
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder} is no folder")
            push_folder(folder, arguments.target)
        else:
            pull_folder(arguments.source, expand(arguments.target))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
