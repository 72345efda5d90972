"""`declutr copy FROM TO`: a folder between this host and an object store, with checksums, as a whole or not at all."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import Parser, answered
from declutr.common.errors import AlteredError, RemoteError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import LISTING, FileRecord, atomic_folder, records, refuse_names
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder

_COMPARED_BYTES = 2**20  # larger files in no list are compared by their size
PLAN = "plan.json"  # the first file of a preparation's output


def fetch_all(remote: Folder, local: Path) -> int:
    """Fetches everything at an address to a folder of this host that is new or empty, or holds the same files already.

    The address names a folder that was sent whole, or a folder of such folders and further files, like a run. Returns
    the number of files.
    """
    local = Path(os.path.realpath(local))  # a link stays; what it names is filled
    if local.is_mount():
        raise RemoteError(f"{local} is a mount point, which cannot be replaced; name a folder in it")
    available = _tree(remote)
    if not available:
        raise FileNotFoundError(f"{remote.url}: nothing found; check the address")
    if PLAN in available and available[PLAN] is None:  # the list of a finished output names it, with its checksum
        raise RemoteError(
            f"{remote.url} has no list of its files: it is an unfinished preparation (repeat its `declutr prepare`) or "
            "was not sent by `declutr copy` (fetch it as it was sent)"
        )
    if local.exists() and not local.is_dir():
        raise RemoteError(f"{local} is a file; name a folder")
    if local.exists() and any(local.iterdir()):
        if all((local / name).is_file() for name in available) and _is_copy(remote, local, available):
            return 0
        # Nothing is replaced: a file that differs may have been changed here.
        raise RemoteError(
            f"{local} holds files, and is no whole copy of {remote.url}. Nothing was fetched or deleted: name a new "
            "folder, or delete this one yourself"
        )
    get_logger().info("fetching %d files from %s", len(available), remote.url)
    with contextlib.suppress(FileNotFoundError):
        local.rmdir()  # it is empty
    with atomic_folder(local) as aside:
        remote.fetch_all(available, aside)
    return len(available)


def _is_copy(remote: Folder, local: Path, available: Mapping[str, FileRecord | None]) -> bool:
    """Returns True if a folder has these files of the address and no other."""
    here = records(local)
    if here.keys() != available.keys():
        return False
    with tempfile.TemporaryDirectory(dir=local.parent) as aside:  # only the bytes of a file in no list tell
        remote.fetch_all({name: None for name, record in available.items() if record is None}, Path(aside))
        return here == {**available, **records(Path(aside))}


def _tree(remote: Folder) -> dict[str, FileRecord | None]:
    """All files below an address with the records of their lists; None for files in no list."""
    if (listing := remote.listing()) is not None:
        return dict(listing)
    files, kinds = dict[str, FileRecord | None](), remote.kinds()
    if kinds == {"": "file"}:
        raise RemoteError(f"{remote.url} is a file; name its folder")
    refuse_names(kinds, remote.url)
    if special := {name: kind for name, kind in kinds.items() if kind not in ("file", "directory")}:
        raise AlteredError(f"{remote.url}: these entries are neither files nor folders: {special}")
    for name, kind in kinds.items():
        if kind == "file":
            files[name] = None
        else:
            files |= {f"{name}/{below}": record for below, record in _tree(remote / name).items()}
    return files


@answered
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `copy FROM TO`; returns the exit status."""
    parser = Parser(prog="declutr copy", description="Copy a folder to an object store or from there, with checksums.")
    address = "a folder, or an address: s3://..., gs://... or another protocol of fsspec"
    parser.add_argument("source", metavar="FROM", help=address)
    parser.add_argument("target", metavar="TO", help=f"{address}; a folder is new or empty")
    options = parser.parse_args(argv)
    source, target = options.source, options.target
    setup_logging("copy")
    folders = [expand(place) for place in (source, target) if not is_remote(place)]
    if len(folders) != 1:
        here = "neither is an address: use `cp -r`, or rsync for another host"
        what = here if folders else "both are addresses: copy to a folder, then from it"
        raise NotADirectoryError(f"{source}, {target}: {what}")
    folder = folders[0]
    if target.startswith(("http://", "https://", "memory://")):
        raise UsageError(f"{target}: it takes no files; name a bucket, as s3://BUCKET/FOLDER")
    local = target.startswith(("file://", "local://"))
    if local and expand(target.partition("://")[2] or "/").resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{target} is in {folder}, which would be copied into itself; name a folder elsewhere")
    if is_remote(target):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        for path in sorted(folder.rglob("*")):
            if not path.is_file() and (path.is_symlink() or not path.is_dir()):
                get_logger().warning("%s is not sent: it is a link to a folder, a broken link, or not a file", path)
        if (other := _other(Folder(target), folder)) is not None:
            what = f"files of another folder, or other ones than {folder} ({other})"
            raise UsageError(f"{target}: holds {what}, and nothing is replaced; name a new address")
        get_logger().info("sending %s to %s", _size(folder), target)
        number, verb = Folder(target).send(folder), "sent"
    else:
        number, verb = fetch_all(Folder(source), folder), "fetched"
    sys.stdout.write(f"{target}: {_size(folder)}, {number:,} of them {verb}\n")
    return 0


def _other(remote: Folder, folder: Path) -> str | None:
    """A file at an address that sending a folder would replace, if there is one; an interrupted transfer goes on."""
    there = remote.sizes()
    here, listing = records(folder) if there else {}, remote.listing() or {}
    for name, num_bytes in sorted(there.items()):
        record = here.get(name)
        if name == LISTING or (record is not None and listing.get(name) == record):
            continue
        if record is None or name in listing or num_bytes > record.num_bytes:  # an own one is whole or cut
            return name
        if num_bytes <= _COMPARED_BYTES and remote.read(name) != (folder / name).read_bytes()[:num_bytes]:
            return name
    return None


def _size(folder: Path) -> str:
    """Number and size of the files of a folder, as text."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{sum(sizes) / 2**20:,.1f} MiB in {len(sizes):,} files"
