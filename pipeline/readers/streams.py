"""The bytes of files: opened here, in a store or on another host, as streams with a position; decompressed.

Memory and length are bounded here: sizes in headers are not trusted, and no file decompresses without end.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

import pyarrow as pa

from declutr.common.errors import RemoteError, redact
from declutr.common.stores.address import OBJECT_STORES, filesystem, is_remote, retried
from declutr.pipeline.readers.corpus import END, ReadFailure, Rules, failed, unreadable

CHUNK_BYTES = 1 << 20
_REMOTE_CHUNK_BYTES = 8 * CHUNK_BYTES
BLOCK_BYTES = 512  # block size of a tar archive; also the size of the head that format detection looks at
# Memory limit of xz, four times the need of `xz -9`; a header that requests more is refused.
XZ_MEMORY_BYTES = 256 << 20

FREE_BYTES = 1 << 29  # any file may decompress to this size
# Beyond FREE_BYTES, all layers of a file together may give this many times the bytes read of it. Text is 3 to 200
# times its compressed size; one layer of gzip gives at most 1,032 times.
MAX_RATIO = 1000

# Errors from damaged or missing files: system and network, early end, gzip, xz, Parquet/Arrow/zstd.
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)

_COMPRESSED_BYTES = 1 << 16
_ZSTD_BYTES = 1 << 16  # bytes requested at a time: Arrow returns nothing of a request in which zstd data are damaged
_MAGIC = (("gz", b"\x1f\x8b\x08"), ("xz", b"\xfd7zXZ\x00"), ("zst", b"\x28\xb5\x2f\xfd"))
_BZ2 = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # of a first block, and of the end of an empty file
_ENGINES: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(31),  # 16 + 15: gzip's header and checksum, with the largest window
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES),
    "bz2": bz2.BZ2Decompressor,
}


class ByteStream(io.RawIOBase):
    """Buffered bytes from a function that reads the next ones; a file that Arrow can read forward."""

    def __init__(
        self,
        read: Callable[[int], bytes],  # returns at most the given number of bytes, none only at the end
        position: int = 0,  # position of the first byte in its logical file
        chunk_bytes: int = CHUNK_BYTES,  # bytes requested at a time
        # moves `read` to a position, for skipping far ahead; None if not possible.
        seek: Callable[[int], Any] | None = None,
    ) -> None:
        self._read = read
        self._seek = seek
        self._chunk_bytes = chunk_bytes
        self._buffer = b""
        self._next = 0
        self.position = position
        self._error: Exception | None = None

    def readable(self) -> bool:
        """Returns True."""
        return True

    def _more(self, num_bytes: int) -> bytes:
        """Reads the next bytes. An error is raised again at every later call, so that no broken decoder continues."""
        if self._error is not None:
            raise self._error
        try:
            return self._read(num_bytes)
        except READ_ERRORS as error:
            self._error = error  # a decoder that continued after damage would give text that was never there
            raise

    def peek(self, num_bytes: int) -> bytes:
        """The next bytes without consuming them; fewer only at the end."""
        while len(self._buffer) - self._next < num_bytes and (more := self._more(self._chunk_bytes)):
            self._buffer = self._buffer[self._next :] + more
            self._next = 0
        return self._buffer[self._next : self._next + num_bytes]

    def head(self, num_bytes: int) -> bytes:
        """The next bytes without consuming them; fewer at the end and before damage, which `read` then meets."""
        with suppress(*READ_ERRORS):
            self.peek(num_bytes)
        return self._buffer[self._next : self._next + num_bytes]

    def read(self, num_bytes: int = CHUNK_BYTES) -> bytes:
        """At most the next `num_bytes` bytes; none at the end."""
        if self._next >= len(self._buffer):
            self._buffer, self._next = self._more(max(num_bytes, self._chunk_bytes)), 0
        data = self._buffer[self._next : self._next + num_bytes]
        self._next += len(data)
        self.position += len(data)
        return data

    def read_whole(self, num_bytes: int) -> bytes:
        """Exactly the next bytes; fewer only at the end."""
        data = self.read(num_bytes)
        if len(data) == num_bytes or not data:
            return data
        gathered = bytearray(data)
        while len(gathered) < num_bytes and (more := self.read(num_bytes - len(gathered))):
            gathered += more
        return bytes(gathered)

    def unread(self, data: bytes) -> None:
        """Puts back the bytes that were read last."""
        if self._buffer.endswith(data, 0, self._next):  # a copy of the rest for each of many small members takes long
            self._next -= len(data)
        else:
            self._buffer, self._next = data + self._buffer[self._next :], 0
        self.position -= len(data)

    def skip(self, num_bytes: int) -> None:
        """Skips bytes, at most to the end."""
        num_buffered = min(num_bytes, len(self._buffer) - self._next)
        self._next += num_buffered
        self.position += num_buffered
        left = num_bytes - num_buffered
        if left and self._seek is not None and left > self._chunk_bytes:
            self._seek(self.position + left)
            self.position += left
            return
        while left and (data := self.read(min(left, CHUNK_BYTES))):
            left -= len(data)


@dataclass(slots=True)
class Body:
    """The uncompressed content of a file, of a stretch of one, or of a member of an archive, with the rules for it."""

    stream: ByteStream
    source: str  # name of the file, with those of archives around it
    rules: Rules
    stop: int = END  # position behind which no record begins
    share: float = 0.0  # share of the rows of a table that were read, in [0, 1]


def bounded_content(body: Body, max_bytes: int, excess: str) -> bytearray | ReadFailure:
    """The content of a file of at most this many bytes; its failure, with the message `excess` if it is longer."""
    data = bytearray()
    try:
        while len(data) <= max_bytes and (chunk := body.stream.read()):  # a size in a header is not trusted
            data += chunk
    except READ_ERRORS as error:
        return unreadable(error, body.source, 0)
    return data if len(data) <= max_bytes else failed("too_large", body.source, 0, excess)


def compression_of(head: bytes) -> str | None:
    """The compression of a file that starts with these bytes (at least 10): gz, xz, zst, bz2 or None."""
    for name, magic in _MAGIC:
        if head.startswith(magic):
            return name
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a skippable frame, as pzstd writes first
        return "zst"
    return "bz2" if head.startswith(b"BZh") and head[4:10] in _BZ2 else None


class Allowance:
    """Limit of the uncompressed bytes of one file, over all layers of compression."""

    def __init__(self, file: ByteStream) -> None:
        self._file = file
        self._spent = 0

    def spend(self, num_bytes: int) -> None:
        """Counts uncompressed bytes."""
        self._spent += num_bytes
        if self._spent > FREE_BYTES + MAX_RATIO * self._file.position:
            raise OSError(
                f"{self._file.position} bytes decompress to more than {MAX_RATIO} times as many and "
                f"{FREE_BYTES >> 20} MiB, which no text does"
            )


def decompressed(
    source: ByteStream,  # compressed bytes
    compression: str,  # result of `compression_of`
    allowance: Allowance,  # limit of the whole file; the stream raises OSError if it is exceeded
    chunk_bytes: int = CHUNK_BYTES,  # uncompressed bytes at a time
) -> ByteStream:
    """The uncompressed stream. Concatenated compressed streams are read as one, as the compression tools do."""
    if compression == "zst":
        below, size = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd").read, _ZSTD_BYTES
    else:
        below, size = _member_reader(source, compression), chunk_bytes

    def read(num_bytes: int) -> bytes:
        try:
            data: bytes = below(min(num_bytes, size))
        except pa.ArrowException as error:
            if "too much memory" not in str(error):
                raise
            raise OSError("its window is above 128 MiB; compress it again with zstd --long=27 or less") from error
        allowance.spend(len(data))
        return data

    return ByteStream(read, 0, chunk_bytes)


def _member_reader(source: ByteStream, compression: str) -> Callable[[int], bytes]:
    """A function that reads uncompressed bytes of gzip, xz or bzip2, member by member; none at the end."""
    engine: Any = None

    def read(num_bytes: int) -> bytes:
        nonlocal engine
        while True:
            if engine is None:
                # Zeros between and after members are padding.
                while (head := source.peek(16)) and (num_zeros := len(head) - len(head.lstrip(b"\0"))):
                    source.skip(num_zeros)
                if not head:
                    return b""
                if compression_of(head) != compression:
                    raise OSError(f"what follows the {compression} data is no {compression} data")
                engine = _ENGINES[compression]()
            # gzip's engine gives back the input that it has not used, the others keep it.
            compressed, is_end = engine.unconsumed_tail if compression == "gz" else b"", False
            if not compressed and (compression == "gz" or engine.needs_input):
                compressed = source.read(_COMPRESSED_BYTES)
                is_end = not compressed
            data = bytes(engine.decompress(compressed, num_bytes))
            if is_end and not data and not engine.eof:
                raise EOFError(f"the {compression} data end early")
            if engine.eof:
                source.unread(engine.unused_data)  # the next member, as `cat a.gz b.gz` and pigz write it
                engine = None
            if data:  # none would mean the end
                return data

    return read


class StoreLostError(Exception):
    """A store that no longer answers or refuses. It is no OSError, which readers count as a failure of the file."""


def open_input(path: str, retry_seconds: float = 0.0) -> BinaryIO:
    """A file at a path or an address for reading, with `seek`; an object store that does not answer is asked again."""
    if not is_remote(path):
        return cast(BinaryIO, open(path, "rb", buffering=0))  # noqa: PTH123
    # elsewhere the library has retried, and no code of an error says which one stays
    ask = partial(_asked, redact(path), retry_seconds if path.startswith(OBJECT_STORES) else 0.0)
    files, name, _ = ask(lambda: filesystem(path))
    return cast(BinaryIO, _RemoteFile(ask(lambda: files.open(name, "rb")), ask))


def _asked(path: str, retry_seconds: float, action: Callable[[], Any]) -> Any:
    try:
        return retried(path, retry_seconds, action)
    except RemoteError as error:
        raise StoreLostError(str(error)) from error


def stream_of(file: BinaryIO, path: str, start: int = 0, stop: int = END) -> ByteStream:
    """The bytes of an open file from `start` on; chunks of remote files grow, because a sample needs the first alone.

    Behind `stop`, where only the end of a record is needed, remote files are read in small chunks.
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
    """A remote file whose reads go through `ask`: errors of the library behind it are StoreLostError."""

    def __init__(self, file: Any, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._ask = file, ask

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        place = self._file.tell()

        def read_here() -> bytes:
            try:
                return bytes(self._file.read(num_bytes))
            except OSError:
                self._file.seek(place)  # a read that failed may have moved, or have ended a stream of Google's
                raise

        return bytes(self._ask(read_here))

    def seek(self, position: int, whence: int = 0) -> int:
        self._ask(lambda: self._file.seek(position, whence))
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
