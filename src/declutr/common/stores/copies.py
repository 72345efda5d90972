"""`declutr copy FROM TO`: a folder between this host and an object store, with checksums, as a whole or not at all.

Next to a fetched folder FOLDER, `.FOLDER.pulled` lists the files that were fetched. So the next `copy` can tell a file
that it may replace from one that a user created or changed.
"""

import fcntl
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import Parser, answered, excerpt
from declutr.common.errors import AlteredError, RemoteError
from declutr.common.paths import expand
from declutr.common.storage import (
    FileRecord,
    Files,
    atomic_folder,
    decoded,
    encoded,
    put_back,
    records,
    refuse_names,
    write_text,
)
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder

PLAN = "plan.json"
"""The first file of a preparation's output."""


def fetch_all(remote: Folder, local: Path) -> int:
    """Fetches everything at an address, then replaces the earlier copy; unchanged files are not fetched again.

    The address names a folder that was sent whole, or a folder of such folders and further files, like a run. `local`
    is new, empty, or an unchanged copy that this function made.

    Returns:
        The number of files fetched.

    Raises:
        FileNotFoundError: nothing exists at that address.
        AlteredError: a remote file is missing, altered, or has a name that is not allowed here.
        RemoteError: a preparation into that address is unfinished, `local` holds other files, the store refuses, or it
            did not answer in time.
    """
    local = Path(os.path.realpath(local))
    if local.is_mount():
        raise RemoteError(f"{local} is a mount point, which cannot be replaced; name a folder in it")
    available = _tree(remote)
    if not available:
        raise FileNotFoundError(f"{remote.url}: nothing found; check the address")
    if available.get(PLAN, available) is None:  # there, and in no list; the list of a finished output names it
        raise RemoteError(
            f"{remote.url} holds an unfinished preparation, so nothing was fetched; repeat its `declutr prepare`, or "
            "delete it"
        )
    local.parent.mkdir(parents=True, exist_ok=True)
    mark = local.with_name(f".{local.name}.pulled")
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        put_back(local)
        stamps = _stamps(local)
        here = _replaceable(local, mark, available)
        new = [name for name, record in available.items() if record is None or here.get(name) != record]
        if here != available:
            get_logger().info("fetching %d of %d files from %s", len(new), len(available), remote.url)
            with atomic_folder(local, replace=True) as aside:
                here = remote.fetch_all(available, aside, local, here)
                if _stamps(local) != stamps:
                    raise RemoteError(f"{local} changed during the fetch and was not replaced; name a new folder")
        write_text(mark, encoded(here).decode())
    return len(new)


def _tree(remote: Folder) -> dict[str, FileRecord | None]:
    """All files below an address with the records of their lists; None for files in no list.

    Raises:
        AlteredError: a list is invalid, a name must not be written here, or an entry is neither a file nor a folder.
    """
    listing = remote.listing()
    if listing is not None:
        return dict(listing)
    files, kinds = dict[str, FileRecord | None](), remote.kinds()
    refuse_names(kinds, remote.url)
    if special := {name: kind for name, kind in kinds.items() if kind not in ("file", "directory")}:
        raise AlteredError(f"{remote.url}: these entries are neither files nor folders: {special}")
    for name, kind in kinds.items():
        files |= {name: None} if kind == "file" else {f"{name}/{x}": y for x, y in _tree(remote / name).items()}
    return files


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and modification time of everything in a folder except its subfolders."""
    facts = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (at.st_size, at.st_mtime_ns) for path, at in facts if not stat.S_ISDIR(at.st_mode)}


def _replaceable(local: Path, mark: Path, available: Mapping[str, FileRecord | None]) -> Files:
    """The files of a folder that may be replaced without losing a user's file.

    Raises:
        RemoteError: it is not a folder, or it holds files that `copy` did not fetch.
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
    foreign += [name for name, record in here.items() if record not in (fetched.get(name), available.get(name))]
    if foreign:
        raise RemoteError(
            f"{local} holds files that `declutr copy` did not fetch, or that have changed since: {excerpt(foreign)}. "
            "Nothing was fetched or deleted: name a new folder, or delete this one yourself"
        )
    return here


@answered
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `copy FROM TO`; returns the exit status."""
    parser = Parser(prog="declutr copy", description="Copy a folder to an object store or from there, with checksums.")
    address = "a folder, or an address: s3://..., gs://... or another protocol of fsspec"
    parser.add_argument("source", metavar="FROM", help=address)
    parser.add_argument("target", metavar="TO", help=f"{address}; a folder is new, or the unchanged copy of before")
    options = parser.parse_args(argv)
    source, target = options.source, options.target
    setup_logging("copy")
    if is_remote(source) == is_remote(target):
        which = "both are addresses: copy to a folder, then" if is_remote(source) else "neither is an address: use"
        raise NotADirectoryError(f"{source}, {target}: {which} {'from it' if is_remote(source) else '`cp -r`'}")
    folder = expand(source if is_remote(target) else target)
    if is_remote(target):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        for path in sorted(folder.rglob("*")):
            if not path.is_file() and (path.is_symlink() or not path.is_dir()):
                get_logger().warning("%s is not sent: it is a link to a folder, a broken link, or not a file", path)
        get_logger().info("sending %s to %s", _size(folder), target)
        number, verb = Folder(target).send(folder), "sent"
    else:
        number, verb = fetch_all(Folder(source), folder), "fetched"
    sys.stdout.write(f"{target}: {_size(folder)}, {number:,} of them {verb}\n")
    return 0


def _size(folder: Path) -> str:
    """Number and size of the files of a folder, as text."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{sum(sizes) / 2**20:,.1f} MiB in {len(sizes):,} files"


if __name__ == "__main__":
    sys.exit(main())
