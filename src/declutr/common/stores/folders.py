"""Folders in object stores: sent and fetched as a whole, with checksums.

An object store has no rename. So the list of a folder's files with their SHA-256 is written last. A folder without a
list, or whose files do not match it, is incomplete.

Every function raises RemoteError if the store refuses, or did not answer within the time of `retries`.
"""

import argparse
import fcntl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.paths import expand
from declutr.common.storage import atomic_folder
from declutr.common.stores.address import child, is_remote, short_name
from declutr.common.stores.copies import (
    LISTING,
    FileRecord,
    encoded,
    fetch_all,
    pull_all,
    read_listing,
    records,
    refuse_names,
)
from declutr.common.stores.files import push_file, remove_file, remove_tree, write_file
from declutr.common.stores.retry import DEFAULT_RETRIES, RetryPolicy


def push_folder(local: Path, url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> int:
    """Sends a folder, its list of files last; returns the number of files sent: those that the store did not have.

    Nothing in the folder may change during the transfer. Other files of an earlier transfer are removed. After an error
    of the store, the remote folder is incomplete.

    Raises:
        AlteredError: a file has a name that `pull` would refuse.
    """
    new = records(local)
    refuse_names(new, str(local))
    old = read_listing(url, retries)
    if old == new:
        return 0
    if old is not None:  # marks the folder as incomplete until the new list is written
        remove_file(child(url, LISTING), retries)
    sent = [name for name in new if old is None or old.get(name) != new[name]]
    for name in sent:
        push_file(local / name, child(url, name), retries)
    write_file(child(url, LISTING), encoded(new), retries)
    for name in sorted(set(old or ()) - set(new)):
        remove_file(child(url, name), retries)
    return len(sent)


def pull_folder(url: str, local: Path, retries: RetryPolicy = DEFAULT_RETRIES, renew: bool = False) -> None:
    """Fetches a folder sent by `push_folder`; it gets its name when it is complete and matches its checksums.

    If several processes of a host request the same folder, one of them fetches it and the others wait. An existing
    folder is kept; with `renew`, it is replaced unless it is the same.

    Raises:
        FileNotFoundError: no complete folder exists at that address.
        AlteredError: a file is missing or altered.
    """
    if renew or not local.exists():
        _pull(url, _whole_listing(url, retries), local, retries, renew)


def local_copy(url: str, cache: Path, retries: RetryPolicy = DEFAULT_RETRIES) -> Path:
    """This host's copy of a folder, fetched to `cache` at first use; a folder with other content gets another copy.

    Raises:
        FileNotFoundError, AlteredError: see `pull_folder`.
    """
    return local_files(url, _whole_listing(url, retries), cache, retries)


def local_files(
    url: str, listing: Mapping[str, FileRecord], cache: Path, retries: RetryPolicy = DEFAULT_RETRIES
) -> Path:
    """Like `local_copy`, but of these files of a folder, which need not be complete.

    Raises:
        AlteredError: a file is missing or altered.
    """
    local = cache / short_name(url, msgspec.json.encode(listing, order="sorted"))
    _pull(url, listing, local, retries)
    return local


def is_whole(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> bool:
    """Returns True if the remote folder is complete; its files are not read."""
    return read_listing(url, retries) is not None


def remove_folder(url: str, retries: RetryPolicy = DEFAULT_RETRIES) -> None:
    """Removes a folder, its list first, so that the rest counts as incomplete if this is stopped."""
    remove_file(child(url, LISTING), retries)
    remove_tree(url, retries)


def _pull(url: str, listing: Mapping[str, FileRecord], local: Path, retries: RetryPolicy, renew: bool = False) -> None:
    local.parent.mkdir(parents=True, exist_ok=True)
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if local.exists() and (not renew or records(local) == listing):
            return
        with atomic_folder(local, replace=True) as aside:
            fetch_all(url, listing, aside, retries)


def _whole_listing(url: str, retries: RetryPolicy) -> dict[str, FileRecord]:
    listing = read_listing(url, retries)
    if listing is None:
        raise FileNotFoundError(f"{url}: no complete folder found ({LISTING} is missing)")
    return listing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `push FOLDER ADDRESS` or `pull ADDRESS FOLDER`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr", description="Send and fetch whole folders to and from object stores, with checksums."
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    send = directions.add_parser("push", description="Send a folder to an object store, with checksums.")
    send.add_argument("source", metavar="folder", help="a folder")
    send.add_argument("target", metavar="address", help="s3://..., gs://... or any address that fsspec supports")
    fetch = directions.add_parser("pull", description="Fetch a folder or a run from an object store, with checksums.")
    fetch.add_argument("source", metavar="address", help="s3://..., gs://... or any address that fsspec supports")
    fetch.add_argument("target", metavar="folder", help="a new folder, or the unchanged copy of an earlier pull")
    arguments = parser.parse_args(argv)
    setup_logging(arguments.direction)
    try:
        if arguments.direction == "push":
            folder = expand(arguments.source)
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder} is not a folder")
            for path in sorted(folder.rglob("*")):
                if not path.is_file() and (path.is_symlink() or not path.is_dir()):
                    get_logger().warning("%s is not sent: it is a link to a folder, a broken link, or not a file", path)
            get_logger().info("sending %s to %s", _size(folder), arguments.target)
            sent = push_folder(folder, arguments.target)
            sys.stdout.write(f"{arguments.target}: {_size(folder)}, {sent:,} of them sent\n")
        else:
            if not is_remote(arguments.source) and expand(arguments.source).is_file():
                raise NotADirectoryError(f"{arguments.source} is a file; name the address of a folder")
            folder = expand(arguments.target)
            fetched = pull_all(arguments.source, folder)
            sys.stdout.write(f"{folder}: {_size(folder)}, {fetched:,} of them fetched\n")
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _size(folder: Path) -> str:
    """Number and size of the files of a folder, as text."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{sum(sizes) / 2**20:,.1f} MiB in {len(sizes):,} files"


def push(argv: Sequence[str]) -> int:
    """Runs `declutr push FOLDER ADDRESS`."""
    return main(["push", *argv])


def pull(argv: Sequence[str]) -> int:
    """Runs `declutr pull ADDRESS FOLDER`."""
    return main(["pull", *argv])


if __name__ == "__main__":
    sys.exit(main())
