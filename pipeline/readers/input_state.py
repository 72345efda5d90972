"""States that show whether an input has changed: its time, a digest of samples, a digest of all bytes read."""

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from declutr.common.config import Strict
from declutr.common.storage import hash_file, hash_json
from declutr.common.stores.address import filesystem, is_remote, network_errors
from declutr.pipeline.readers.corpus import END, Part
from declutr.pipeline.readers.streams import BLOCK_BYTES, CHUNK_BYTES, compression_of

_SAMPLE_BYTES = 1 << 16
# Keys under which file systems give the tag or the time of a file's content, the most reliable first.
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "last_modified", "LastModified", "updated", "mtime")
_THREADS = 16


class FileState(Strict):
    """State of one file."""

    modified: str  # size and modification time; for a remote file its size and its tag (or its time, if it has no tag)
    sample: str  # SHA-256 of the first, middle and last 64 KiB; empty for a remote file, where each needs a request


class InputState(Strict):
    """State of the inputs of a unit."""

    modified: str  # hash of the `modified` of all files
    sample: str  # hash of the `sample` of all files
    # Hash of every byte that the unit reads; None if not computed (remote files, planned units).
    digest: str | None = None


def read_file_states(parts: Iterable[Part]) -> dict[str, FileState | None]:
    """The states of the files of some parts by path; None for a file that cannot be read."""
    paths = list(dict.fromkeys(part.path for part in parts))
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(_file_state, paths), strict=True))


def input_state_of(parts: Sequence[Part], states: dict[str, FileState | None], digest: str | None = None) -> InputState:
    """The input state of a unit's parts, from the states of their files."""
    file_states = [states[path] for path in dict.fromkeys(part.path for part in parts)]
    return InputState(
        modified=hash_json([state and state.modified for state in file_states]),
        sample=hash_json([state and state.sample for state in file_states]),
        digest=digest,
    )


def digest_parts(parts: Sequence[Part]) -> str | None:
    """SHA-256 of every byte that reading these parts may use; None if one is remote or cannot be read."""
    if any(is_remote(part.path) for part in parts):
        return None
    try:
        return hash_json([_digest_part(part) for part in parts if part.format != "lost"])
    except OSError:
        return None


def _file_state(path: str) -> FileState | None:
    try:
        if not is_remote(path):
            status = Path(path).stat()
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                return FileState(
                    modified=f"{status.st_size}/{status.st_mtime_ns}", sample=_sample(file, status.st_size)
                )
        with network_errors():
            files, name, _ = filesystem(path)
            facts = files.info(name)
    except OSError as error:
        if is_remote(path) and not isinstance(error, FileNotFoundError):  # a store that does not answer says nothing
            raise
        return None
    tags = [str(facts[key]) for key in _TAGS if facts.get(key)]
    return FileState(modified=f"{facts.get('size')}/{tags[0] if tags else ''}", sample="")


def _sample(file: BinaryIO, num_bytes: int) -> str:
    """SHA-256 of the head, middle and tail of a file."""
    digest = hashlib.sha256()
    # A change in place often keeps the size and may keep the time, so times alone are not enough.
    # A set, as those of a small file are one.
    for start in sorted({0, max(0, (num_bytes - _SAMPLE_BYTES) // 2), max(0, num_bytes - _SAMPLE_BYTES)}):
        file.seek(start)
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest_part(part: Part) -> str:
    """Digest of the stretch of a file that a part reads; of the whole file if the stretch is not a byte range."""
    with open(part.path, "rb") as file:  # noqa: PTH123
        if part.format in ("jsonl", "text"):  # the byte before decides if a line starts; the last may pass stop
            return _digest_stretch(file, max(0, part.start - 1), part.stop, to_newline=True)
        if part.format == "tar" and compression_of(file.read(BLOCK_BYTES)) is None:
            return _digest_stretch(file, part.start, part.stop, to_newline=False)
    status = Path(part.path).stat()
    return _digest_file(part.path, status.st_size, status.st_mtime_ns)


def _digest_stretch(file: BinaryIO, start: int, stop: int, to_newline: bool) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    left = min(stop, END) - start
    last = b""
    while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
        last = chunk[-1:]
    while to_newline and last not in (b"", b"\n") and (chunk := file.read(_SAMPLE_BYTES)):
        chunk, newline, _ = chunk.partition(b"\n")
        digest.update(chunk + newline)
        last = newline or chunk[-1:]
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _digest_file(path: str, num_bytes: int, modified_ns: int) -> str:  # noqa: ARG001
    """Computed once a process and file content, because many units may read parts of one file."""
    return hash_file(Path(path))
