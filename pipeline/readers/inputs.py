"""Finding files: on this machine, on S3 and Google Storage by pyarrow, on other protocols by fsspec."""

import errno
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from fsspec.utils import glob_translate

from declutr.common.hub import hub_problem
from declutr.common.paths import expand
from declutr.common.stores.address import (
    address_of,
    files_below,
    filesystem,
    is_object_store,
    is_remote,
    network_errors,
)
from declutr.pipeline.readers.corpus import Input, is_hidden
from declutr.pipeline.readers.skipped import FOLDER, LINKED_FOLDER, SPECIAL, Skipped


def find_inputs(entry: str, skipped: Skipped) -> Iterator[Input]:
    """Finds the files of one entry of `corpus.paths`.

    Unreadable entries are included and marked as lost. Entries that are neither files nor searched are counted in
    `skipped`.

    Raises:
        OSError: the storage does not answer, or refuses; or the entry is no file.
    """
    if is_remote(entry):
        yield from _find_remote(entry)
        return
    root = expand(entry)
    if root.is_file():
        yield _local(root, root.name, searched=False)
    elif root.is_dir():
        yield from _search(root, skipped)
    elif glob.has_magic(str(root)):
        num_plain = next(number for number, part in enumerate(root.parts) if glob.has_magic(part))
        yield from _match(Path(*root.parts[:num_plain]), root.parts[num_plain:], skipped)
    elif root.exists():
        raise OSError("it is a pipe, a socket or a device, which cannot be read again; write its content to a file")


def _search(root: Path, skipped: Skipped) -> Iterator[Input]:
    """Finds everything below a folder. Links to folders are not followed, because they may form a loop."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as scan:
                entries = list(scan)
        except OSError:
            if folder == root:
                raise
            yield _lost(folder, folder.relative_to(root).as_posix())
            continue
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):  # as shells do
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            else:
                yield from _met(path, path.relative_to(root).as_posix(), LINKED_FOLDER, skipped)


def _match(plain: Path, parts: tuple[str, ...], skipped: Skipped) -> Iterator[Input]:
    """Finds everything below a folder that matches a pattern, given as its components. `**` does not follow links."""
    lost: list[Path] = []
    matches = [plain]
    for number, part in enumerate(parts):
        folders = [path for path in matches if path.is_dir()] if number else matches
        steps = [path for folder in folders for path in _step(folder, part, lost)]
        matches = [path for path in dict.fromkeys(steps) if not is_hidden(path.relative_to(plain).as_posix())]
    if plain in lost:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(plain))
    for path in dict.fromkeys(lost):
        yield _lost(path, path.relative_to(plain).as_posix())
    if parts[-1] != "**":
        for path in sorted(matches):
            if "**" not in parts or not path.is_dir():
                yield from _met(path, path.relative_to(plain).as_posix(), FOLDER, skipped)


def _step(folder: Path, part: str, lost: list[Path]) -> Iterator[Path]:
    """Paths in a folder that match one component of a pattern; unreadable folders are added to `lost`."""
    try:
        if part == "**":
            yield folder
            for parent, names, _ in os.walk(folder, onerror=lambda error: lost.append(Path(error.filename))):
                names[:] = [name for name in names if not name.startswith(".")]
                yield from (Path(parent, name) for name in names if not Path(parent, name).is_symlink())
        elif glob.has_magic(part):
            yield from (path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, part))
        else:
            (folder / part).lstat()
            yield folder / part
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        lost.append(folder)


def _met(path: Path, relative: str, folder_kind: str, skipped: Skipped) -> Iterator[Input]:
    """Yields a file that a search met, or counts the path as skipped."""
    try:
        mode = path.stat().st_mode
    except OSError:
        yield _lost(path, relative)
        return
    if stat.S_ISREG(mode):
        yield _local(path, relative, searched=True)
    else:
        skipped.add(folder_kind if stat.S_ISDIR(mode) else SPECIAL, relative)


def _local(path: Path, source: str, *, searched: bool) -> Input:
    # Resolved, so that a file and its links count once.
    return Input(str(path.resolve()), source, path.stat().st_size, searched)


def _lost(path: Path, source: str) -> Input:
    return Input(str(path.absolute()), source, 0, searched=True, lost=True)


def _find_remote(address: str) -> Iterator[Input]:
    if address.startswith("hf://") and (unreached := hub_problem()):
        raise OSError(unreached)
    with network_errors():
        files, path, query = filesystem(address)
        if glob.has_magic(path) and not files.isfile(path):  # a key may hold brackets
            parts = path.split("/")
            num_plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
            root = "/".join(parts[:num_plain])
            if is_object_store(files):
                pattern, levels = re.compile(glob_translate(path)), None if "**" in path else len(parts) - num_plain
                # Not fsspec's glob, which leaves out a folder that cannot be listed.
                below = files_below(files, root, levels)
                infos = {name: info for name, info in below.items() if pattern.match(name)}
            else:
                infos = files.glob(path, detail=True)
        else:
            root = path.rstrip("/")
            try:
                entry = files.info(path)
            except FileNotFoundError:
                return
            if entry["type"] == "file":
                if entry["size"] is None:
                    raise OSError("the server does not tell its size (Content-Length); download it, and name the file")
                yield Input(
                    address_of(files, path, address, query), path.rsplit("/", 1)[-1], entry["size"], searched=False
                )
                return
            below_it = is_object_store(files)
            infos = files_below(files, path) if below_it else files.find(path, detail=True)
        for name in sorted(infos):  # a store lists in any order, and the order of files is that of training
            relative = name.removeprefix(root).lstrip("/")
            if "?" in name and is_object_store(files):
                raise OSError(f"the key {name!r} has a ?, behind which an address has its options; rename it")
            if infos[name]["type"] == "file" and not is_hidden(relative):
                yield Input(address_of(files, name, address, query), relative, infos[name]["size"] or 0, searched=True)
