"""Copies that `declutr pull` makes: whole or as they were before, and never in place of other files.

Beside a copy FOLDER lies `.FOLDER.pulled`, the list of the files that were fetched. By it the next `pull` knows a file
that it may replace from one that somebody made or changed.
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.excerpt import excerpt
from common.storage import folder_aside, put_back, write_text
from common.stores.address import child
from common.stores.files import fetch_file
from common.stores.listing import Record, decoded, encoded, records, tree
from common.stores.patience import PATIENT, AlteredError, Patience, RemoteError

_FETCHES = 8  # files on their way at once: a store gives each stream only so much


def pull_all(url: str, local: Path, patience: Patience = PATIENT) -> None:
    """Fetches all that lies at an address, then swaps it for the earlier copy; files that are here are not sent again.

    Args:
        url: a folder that was sent whole, or one of such folders and further files, like a run.
        local: the folder it becomes: a new one, an empty one, or an unchanged copy that `pull` made.
        patience: with a place that does not answer.

    Raises:
        FileNotFoundError: there is nothing at that address.
        AlteredError: a file is missing or altered there, or has a name that no file here may have.
        RemoteError: `local` holds something else, the place refuses, or did not answer in time.
    """
    local = Path(os.path.realpath(local))
    if local.is_mount():
        raise RemoteError(f"{local} is a mount point, which cannot be swapped: name a folder in it")
    wanted = tree(url, patience)
    if not wanted:
        raise FileNotFoundError(f"{url}: nothing is there")
    local.parent.mkdir(parents=True, exist_ok=True)
    mark = local.with_name(f".{local.name}.pulled")
    with local.with_name(f".{local.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        put_back(local)
        stamps = _stamps(local)
        here = _replaceable(local, mark, wanted)
        if here != wanted:
            with folder_aside(local, replace=True) as aside:
                here = fetch_all(url, wanted, aside, patience, local, here)
                if _stamps(local) != stamps:
                    raise RemoteError(f"{local} changed while it was fetched; it is left as it is. Name a new folder")
        write_text(mark, encoded(here).decode())


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of the last change of everything in a folder but of its folders."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (at.st_size, at.st_mtime_ns) for path, at in found if not stat.S_ISDIR(at.st_mode)}


def _replaceable(local: Path, mark: Path, wanted: Mapping[str, Record | None]) -> dict[str, Record]:
    """The files of a folder, none of which is lost when it gives way.

    Raises:
        RemoteError: the folder is none, or holds what `pull` did not fetch.
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
    wanted: Mapping[str, Record | None],
    aside: Path,
    patience: Patience,
    before: Path | None = None,
    here: Mapping[str, Record] | None = None,
) -> dict[str, Record]:
    """Fetches the files of a folder, several at a time.

    Args:
        url: the folder.
        wanted: its files by name; None: nothing is known of the file.
        aside: takes them.
        patience: with a place that does not answer.
        before: an earlier copy.
        here: its files; those that are as they should be are taken from there.

    Returns:
        The files that `aside` has now.

    Raises:
        AlteredError: a file is missing, or another than its list says.
        RemoteError: the place refuses, or did not answer in time.
    """

    def fetch(name: str) -> Record:
        target, expected = aside / name, wanted[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is not None and here is not None and expected is not None and here.get(name) == expected:
            target.hardlink_to(before / name)
            return expected
        found = Record(*fetch_file(child(url, name), target, patience))
        if expected is not None and found != expected:
            raise AlteredError(f"{child(url, name)} is truncated or altered (checksum differs)")
        return found

    with ThreadPoolExecutor(_FETCHES) as pool:
        return dict(zip(wanted, pool.map(fetch, wanted), strict=True))
