"""Folders in object stores: sent whole, fetched whole, with checksums.

An object store has no rename. So the list of a folder's files with their SHA-256 is written last: a folder without it,
or whose files do not agree with it, was not sent to its end.
"""

import argparse
import fcntl
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from common.address import child, is_remote, short_name
from common.config import expand
from common.logs import setup_logging
from common.remotefile import (
    PATIENT,
    AlteredError,
    Patience,
    fetch_file,
    names,
    pull_file,
    push_file,
    read_file,
    remove_file,
    remove_tree,
    write_file,
)
from common.storage import folder_aside, hash_file

LISTING = ".files.json"
_FETCHES = 8  # files on their way at once: a store gives each stream only so much


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    num_bytes: int


class _Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, _Record]


def push_folder(local: Path, url: str, patience: Patience = PATIENT) -> None:
    """Sends a folder, its list of files last; files that lie there with the same content are not sent again.

    Args:
        local: the folder. Nothing in it may change meanwhile.
        url: the folder it becomes; whatever else lies there is taken away.
        patience: with a place that does not answer.

    Raises:
        RemoteError: the place refuses, or did not answer in time. What was sent is then no whole folder.
    """
    new = _records(local)
    old = _read_listing(url, patience)
    if old == new:
        return
    if old is not None:  # from here on, and until the new list is there, this is no whole folder
        remove_file(child(url, LISTING), patience)
    for name in new:
        if old is None or old.get(name) != new[name]:
            push_file(local / name, child(url, name), patience)
    write_file(child(url, LISTING), msgspec.json.encode(_Listing(new)), patience)
    for name in sorted(set(old or ()) - set(new)):
        remove_file(child(url, name), patience)


def pull_folder(url: str, local: Path, patience: Patience = PATIENT, renew: bool = False) -> None:
    """Fetches a folder; it takes its name when all of it is here and agrees with its checksums.

    Processes of one host that ask for the same folder at the same time fetch it once: the others wait.

    Args:
        url: a folder sent by `push_folder`.
        local: the folder it becomes. If it exists already nothing is done.
        patience: with a place that does not answer.
        renew: take another one's place that exists already, unless it is the same.

    Raises:
        FileNotFoundError: there is no whole folder at that address.
        AlteredError: a file is missing or altered.
        RemoteError: the place refuses, or did not answer in time.
    """
    if renew or not local.exists():
        _pull(url, _whole_listing(url, patience), local, patience, renew)


def local_copy(url: str, cache: Path, patience: Patience = PATIENT) -> Path:
    """This host's copy of a folder, fetched at the first use; what was sent there later is another copy.

    Args:
        url: a folder sent by `push_folder`.
        cache: folder of all copies.
        patience: with a place that does not answer.

    Raises:
        FileNotFoundError, RemoteError: as `pull_folder`.
    """
    listing = _whole_listing(url, patience)
    local = cache / short_name(url, msgspec.json.encode(listing, order="sorted"))
    _pull(url, listing, local, patience)
    return local


def pull_all(url: str, local: Path, patience: Patience = PATIENT) -> None:
    """Fetches what lies in a folder: as `pull_folder` where it has a list, else file by file, and so its folders.

    Raises:
        FileNotFoundError: there is nothing.
        RemoteError: as `pull_folder`.
    """
    if is_whole(url, patience):
        pull_folder(url, local, patience, renew=True)
        return
    found = names(url, patience)
    if not found:
        raise FileNotFoundError(f"{url}: nothing is there")
    local.mkdir(parents=True, exist_ok=True)
    for name in found:
        if not pull_file(child(url, name), local / name, patience):
            pull_all(child(url, name), local / name, patience)


def is_whole(url: str, patience: Patience = PATIENT) -> bool:
    """Whether a folder was sent there to its end; its files are not read.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    return _read_listing(url, patience) is not None


def remove_folder(url: str, patience: Patience = PATIENT) -> None:
    """Takes a folder away, its list first: what is left of it if this is stopped is no whole folder.

    Raises:
        RemoteError: the place refuses, or did not answer in time.
    """
    remove_file(child(url, LISTING), patience)
    remove_tree(url, patience)


def _pull(url: str, listing: dict[str, _Record], local: Path, patience: Patience, renew: bool = False) -> None:
    local.parent.mkdir(parents=True, exist_ok=True)
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if local.exists():
            if not renew or _records(local) == listing:
                return
            shutil.rmtree(local)
        with folder_aside(local) as aside:

            def fetch(name: str) -> None:
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if _Record(*fetch_file(child(url, name), target, patience)) != listing[name]:
                    raise AlteredError(f"{child(url, name)} is truncated or altered (checksum differs)")

            with ThreadPoolExecutor(_FETCHES) as pool:
                for _ in pool.map(fetch, listing):
                    pass


def _records(folder: Path) -> dict[str, _Record]:
    """The files of a folder of this host."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: _Record(hash_file(path), path.stat().st_size) for name, path in paths.items()}


def _read_listing(url: str, patience: Patience) -> dict[str, _Record] | None:
    """Files of a folder; None if its list is not there.

    Raises:
        AlteredError: it is no such list, or names what lies elsewhere.
    """
    raw = read_file(child(url, LISTING), patience)
    if raw is None:
        return None
    try:
        found = msgspec.json.decode(raw, type=_Listing).files
    except msgspec.DecodeError as error:
        raise AlteredError(f"{child(url, LISTING)} is no list of files: {error}") from error
    for name in found:
        if name.startswith("/") or not set(name.split("/")).isdisjoint({"", ".", ".."}):
            raise AlteredError(f"{child(url, LISTING)} names a file outside of the folder: {name!r}")
    return found


def _whole_listing(url: str, patience: Patience) -> dict[str, _Record]:
    listing = _read_listing(url, patience)
    if listing is None:
        raise FileNotFoundError(f"{url}: no whole folder is there ({LISTING} is missing)")
    return listing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `push FOLDER ADDRESS` or `pull ADDRESS FOLDER`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="remote", description="Folders to and from object stores, whole, with checksums."
    )
    parser.add_argument("direction", choices=("push", "pull"))
    parser.add_argument("source", help="push: a folder; pull: s3://..., gs://... or what else fsspec knows")
    parser.add_argument(
        "target", help="push: s3://...; pull: the folder it becomes, where only what differs is fetched"
    )
    arguments = parser.parse_args(argv)
    setup_logging(arguments.direction)
    try:
        if arguments.direction == "push":
            folder = expand(arguments.source)
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder} is no folder")
            push_folder(folder, arguments.target)
        else:
            if not is_remote(arguments.source) and expand(arguments.source).is_file():
                raise NotADirectoryError(f"{arguments.source} is a file; name the address of a folder")
            pull_all(arguments.source, expand(arguments.target))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def push(argv: Sequence[str]) -> int:
    """Runs `declutr push FOLDER ADDRESS`."""
    return main(["push", *argv])


def pull(argv: Sequence[str]) -> int:
    """Runs `declutr pull ADDRESS FOLDER`."""
    return main(["pull", *argv])


if __name__ == "__main__":
    sys.exit(main())
