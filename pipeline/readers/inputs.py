"""Finding and opening files: on this machine, on S3 and Google Storage by pyarrow, on other protocols by fsspec."""

import errno
import fnmatch
import glob
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.utils import glob_translate

from declutr.common.errors import redact
from declutr.common.hub import hub_problem
from declutr.common.paths import expand
from declutr.common.stores.address import (
    address_of,
    explained,
    files_below,
    filesystem,
    is_object_store,
    is_remote,
    network_errors,
)
from declutr.pipeline.readers.corpus import END, Input
from declutr.pipeline.readers.names import is_hidden
from declutr.pipeline.readers.skipped import FOLDER, LINKED_FOLDER, SPECIAL, Skipped
from declutr.pipeline.readers.streams import CHUNK_BYTES, ByteStream

_REMOTE_CHUNK_BYTES = 8 * CHUNK_BYTES


def find_inputs(entry: str, skipped: Skipped) -> Iterator[Input]:
    """Finds the files of one entry of `corpus.paths`.

    Unreadable entries are included and marked as lost. Entries that are neither files nor searched are counted in
    `skipped`.

    Raises:
        OSError: the storage does not answer, or refuses.
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
            if entry.name.startswith("."):
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
    return Input(str(path.resolve()), source, path.stat().st_size, searched)


def _lost(path: Path, source: str) -> Input:
    return Input(str(path.absolute()), source, 0, searched=True, lost=True)


def _find_remote(address: str) -> Iterator[Input]:
    if address.startswith("hf://") and (unreached := hub_problem()):
        raise OSError(unreached)
    with network_errors():
        files, path, query = filesystem(address)
        if glob.has_magic(path):
            parts = path.split("/")
            num_plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
            root = "/".join(parts[:num_plain])
            if is_object_store(files):
                pattern, levels = re.compile(glob_translate(path)), None if "**" in path else len(parts) - num_plain
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
                yield Input(
                    address_of(files, path, address, query), path.rsplit("/", 1)[-1], entry["size"], searched=False
                )
                return
            below_it = is_object_store(files)
            infos = files_below(files, path) if below_it else files.find(path, detail=True)
        for name in sorted(infos):
            relative = name.removeprefix(root).lstrip("/")
            if infos[name]["type"] == "file" and not is_hidden(relative):
                yield Input(address_of(files, name, address, query), relative, infos[name]["size"] or 0, searched=True)


class StoreLostError(Exception):
    """A store that no longer answers or refuses. It is no OSError, which readers count as a failure of the file."""


def open_input(path: str, count: bool = True) -> BinaryIO:
    """A file for reading, with `seek`.

    Args:
        path: path or address.
        count: false raises `StoreLostError` for errors of a store, except that of a file that it does not have.

    Raises:
        OSError: the file is missing, or the storage does not answer or refuses.
    """
    if not is_remote(path):
        return cast(BinaryIO, open(path, "rb", buffering=0))  # noqa: PTH123
    with _store(path, count):
        files, name, _ = filesystem(path)
        return cast(BinaryIO, _RemoteFile(files.open(name, "rb"), path, count))


@contextmanager
def _store(path: str, count: bool) -> Iterator[None]:
    try:
        with network_errors():
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if count:
            raise
        raise StoreLostError(f"{redact(path)}: {explained(error)}") from error


def stream_of(file: BinaryIO, path: str, start: int = 0, stop: int = END) -> ByteStream:
    """The bytes of an open file from `start` on; chunks of remote files grow, because a sample needs the first alone.

    Args:
        file: the file.
        path: its path or address.
        start: first byte.
        stop: byte behind which only the end of a record is needed; remote files are read in small chunks from there on.
    """
    file.seek(start)
    if not is_remote(path):
        return ByteStream(file.read, start, CHUNK_BYTES, file.seek)

    chunk_bytes = CHUNK_BYTES

    def read(num_bytes: int) -> bytes:
        nonlocal chunk_bytes
        max_bytes = min(chunk_bytes, max(CHUNK_BYTES, stop - file.tell()))
        chunk_bytes = min(2 * chunk_bytes, _REMOTE_CHUNK_BYTES)
        return file.read(min(num_bytes, max_bytes))

    return ByteStream(read, start, _REMOTE_CHUNK_BYTES, file.seek)


class _RemoteFile(io.RawIOBase):
    """A remote file that raises OSError for all errors of the library behind it."""

    def __init__(self, file: Any, path: str, count: bool) -> None:
        self._file, self._path, self._count = file, path, count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        with _store(self._path, self._count):
            return bytes(self._file.read(num_bytes))

    def seek(self, position: int, whence: int = 0) -> int:
        with _store(self._path, self._count):
            self._file.seek(position, whence)
            return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
