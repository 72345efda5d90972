"""Where files lie: this machine, S3 and Google Storage through pyarrow, every other protocol through fsspec."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from common.address import address_of, filesystem, is_remote, network_errors
from common.config import expand
from common.hub import hub_problem
from pipeline.corpus import Input
from pipeline.readers.streams import CHUNK_BYTES, ByteStream

_REMOTE_CHUNK_BYTES = 8 * CHUNK_BYTES


def find_inputs(given: str) -> Iterator[Input]:
    """Files that one entry of `corpus.paths` stands for, in the order of their names; none where there is none.

    Raises:
        OSError: the place does not answer, or refuses.
    """
    return _find_remote(given) if is_remote(given) else _find_local(given)


def _find_local(given: str) -> Iterator[Input]:
    root = expand(given)
    if root.is_file():
        yield _local(root, root.name, searched=False)
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if not is_hidden(relative.as_posix()) and path.is_file():
                yield _local(path, relative.as_posix(), searched=True)
    elif glob.has_magic(str(root)):
        num_plain = next(number for number, part in enumerate(root.parts) if glob.has_magic(part))
        plain = Path(*root.parts[:num_plain])
        for path in sorted(plain.glob(str(Path(*root.parts[num_plain:])))):
            relative = path.relative_to(plain)
            if not is_hidden(relative.as_posix()) and path.is_file():
                yield _local(path, relative.as_posix(), searched=True)


def _local(path: Path, source: str, *, searched: bool) -> Input:
    return Input(str(path.resolve()), source, path.stat().st_size, searched)


def is_hidden(relative: str) -> bool:
    """Whether a name on the way from the input root starts with a dot."""
    return any(name.startswith(".") and name not in (".", "..") for name in relative.split("/"))


def _find_remote(given: str) -> Iterator[Input]:
    if given.startswith("hf://") and (unreached := hub_problem()):
        raise OSError(unreached)
    with network_errors():
        files, path, query = filesystem(given)
        if glob.has_magic(path):
            parts = path.split("/")
            num_plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
            root = "/".join(parts[:num_plain])
            found = files.glob(path, detail=True)
        else:
            root = path.rstrip("/")
            try:
                entry = files.info(path)
            except FileNotFoundError:
                return
            if entry["type"] == "file":
                yield Input(
                    address_of(files, path, given, query), path.rsplit("/", 1)[-1], entry["size"], searched=False
                )
                return
            found = files.find(path, detail=True)
        for name in sorted(found):
            relative = name.removeprefix(root).lstrip("/")
            if found[name]["type"] == "file" and not is_hidden(relative):
                yield Input(address_of(files, name, given, query), relative, found[name]["size"] or 0, searched=True)


def open_input(path: str) -> BinaryIO:
    """A file for reading, with `seek`.

    Raises:
        OSError: there is no such file, or the place does not answer or refuses.
    """
    if not is_remote(path):
        return cast(BinaryIO, open(path, "rb", buffering=0))  # noqa: PTH123
    with network_errors():
        files, name, _ = filesystem(path)
        return cast(BinaryIO, _RemoteFile(files.open(name, "rb")))


def stream_of(file: BinaryIO, path: str, start: int = 0) -> ByteStream:
    """The bytes of an open file from `start` on; from far away more at a time."""
    file.seek(start)
    chunk_bytes = _REMOTE_CHUNK_BYTES if is_remote(path) else CHUNK_BYTES
    return ByteStream(file.read, start, chunk_bytes, file.seek)


class _RemoteFile:
    """A remote file whose failures are OSErrors, whatever the library behind it raises."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.closed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def read(self, num_bytes: int = -1) -> bytes:
        with network_errors():
            return bytes(self._file.read(num_bytes))

    def seek(self, position: int, whence: int = 0) -> int:
        with network_errors():
            self._file.seek(position, whence)
            return int(self._file.tell())

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self._file.close()

    def __enter__(self) -> "_RemoteFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
