"""Streams of bytes with a position, and the uncompressed stream of a compressed one. Memory and length are bounded."""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import pyarrow as pa

CHUNK_BYTES = 1 << 20
BLOCK_BYTES = 512
"""Of a tar archive; also what is looked at to tell what a file is."""
XZ_MEMORY_BYTES = 256 << 20
"""Four times what `xz -9` needs: a header that asks for more is refused."""

FREE_BYTES = 1 << 29
"""A file may decompress to this much, however small it is."""
MAX_RATIO = 1000
"""Beyond that, its layers together may give so many times the bytes that were read of it. Text is 3 to 200 times its
compressed size; one layer of gzip gives at most 1,032 times."""

READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException)
"""What reading damaged or vanished files raises: system and network, early ends, gzip, xz, Parquet/Arrow/zstd."""

_COMPRESSED_BYTES = 1 << 16
_ZSTD_BYTES = 1 << 16
"""Asked for at a time: Arrow gives nothing of a stretch of zstd data in which it meets damage."""
_MAGIC = (
    ("gz", b"\x1f\x8b\x08"),
    ("xz", b"\xfd7zXZ\x00"),
    ("zst", b"\x28\xb5\x2f\xfd"),
    ("zst", b"\x50\x2a\x4d\x18"),  # a skippable frame, as pzstd writes first
)
_BZ2 = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
COMPRESSED_SUFFIXES = {".gz": "", ".xz": "", ".zst": "", ".zstd": "", ".bz2": "", ".tgz": ".tar", ".txz": ".tar"}
"""Suffix of a compressed file, and the one that it stands for."""


class ByteStream:
    """Bytes in order, from a function that reads some more.

    Args:
        read: gives at most so many bytes, none only at the end.
        position: position of the first byte in its logical file.
        chunk_bytes: how much is asked for at a time.
        seek: for skipping far ahead, moves `read` to a position, where it can.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        position: int = 0,
        chunk_bytes: int = CHUNK_BYTES,
        seek: Callable[[int], Any] | None = None,
    ) -> None:
        self._read = read
        self._seek = seek
        self._chunk_bytes = chunk_bytes
        self._held = b""
        self._next = 0
        self.position = position
        self._error: Exception | None = None

    def _more(self, num_bytes: int) -> bytes:
        """Reads from below. What failed once fails again: a broken decoder must not go on with nonsense."""
        if self._error is not None:
            raise self._error
        try:
            return self._read(num_bytes)
        except READ_ERRORS as error:
            self._error = error
            raise

    def peek(self, num_bytes: int) -> bytes:
        """The next bytes without consuming them; fewer only at the end."""
        while len(self._held) - self._next < num_bytes and (more := self._more(self._chunk_bytes)):
            self._held = self._held[self._next :] + more
            self._next = 0
        return self._held[self._next : self._next + num_bytes]

    def read(self, num_bytes: int = CHUNK_BYTES) -> bytes:
        """Some of the next bytes, at most `num_bytes`; none at the end."""
        if self._next >= len(self._held):
            self._held, self._next = self._more(max(num_bytes, self._chunk_bytes)), 0
        data = self._held[self._next : self._next + num_bytes]
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
        """Puts back bytes that were read last."""
        self._held = data + self._held[self._next :]
        self._next = 0
        self.position -= len(data)

    def skip(self, num_bytes: int) -> None:
        """Passes over bytes, or to the end where there are fewer."""
        held = min(num_bytes, len(self._held) - self._next)
        self._next += held
        self.position += held
        left = num_bytes - held
        if left and self._seek is not None and left > self._chunk_bytes:
            self._seek(self.position + left)
            self.position += left
            return
        while left and (data := self.read(min(left, CHUNK_BYTES))):
            left -= len(data)


def compression_of(head: bytes) -> str | None:
    """What a file that begins with these bytes (at least 10) is compressed with: gz, xz, zst, bz2 or nothing."""
    for name, magic in _MAGIC:
        if head.startswith(magic):
            return name
    return "bz2" if head.startswith(b"BZh") and head[4:10] in _BZ2 else None


class Allowance:
    """How much all layers of compression of one file may give together.

    Args:
        file: the file itself, whose position tells how much was read of it.
    """

    def __init__(self, file: ByteStream) -> None:
        self._file = file
        self._given = 0

    def spend(self, num_bytes: int) -> None:
        """Notes uncompressed bytes.

        Raises:
            OSError: it is more than text can give.
        """
        self._given += num_bytes
        if self._given > FREE_BYTES + MAX_RATIO * self._file.position:
            raise OSError(
                f"{self._file.position} bytes decompress to more than {MAX_RATIO} times as many and "
                f"{FREE_BYTES >> 20} MiB, which no text does"
            )


def decompressed(
    source: ByteStream, compression: str, allowance: Allowance, chunk_bytes: int = CHUNK_BYTES
) -> ByteStream:
    """The uncompressed stream. Several compressed streams one after the other are one, as for the tools themselves.

    Args:
        source: compressed bytes.
        compression: as `compression_of` gives it.
        allowance: of the file that all this lies in; the stream breaks off with OSError where it is exceeded.
        chunk_bytes: how much is uncompressed at a time.
    """
    if compression == "zst":
        below, most = pa.CompressedInputStream(pa.PythonFile(as_file(source), mode="r"), "zstd").read, _ZSTD_BYTES
    else:
        below, most = _Members(source, compression).read, chunk_bytes

    def read(num_bytes: int) -> bytes:
        data: bytes = below(min(num_bytes, most))
        allowance.spend(len(data))
        return data

    return ByteStream(read, 0, chunk_bytes)


class _Members:
    """gzip, xz and bzip2, member by member."""

    def __init__(self, source: ByteStream, compression: str) -> None:
        self._source = source
        self._compression = compression
        self._engine: Any = None

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` uncompressed bytes, whatever the ratio; none at the end."""
        while True:
            if self._engine is None and not self._begin():
                return b""
            data = self._pull(num_bytes)
            if self._engine.eof:
                self._source.unread(self._engine.unused_data)
                self._engine = None
            if data:
                return data

    def _begin(self) -> bool:
        """Starts the next member, if there is one. Zeros between and after members are padding."""
        while (head := self._source.peek(16)) and (num_zeros := len(head) - len(head.lstrip(b"\0"))):
            self._source.skip(num_zeros)
        if not head:
            return False
        if compression_of(head) != self._compression:
            raise OSError(f"what follows the {self._compression} data is no {self._compression} data")
        if self._compression == "gz":
            self._engine = zlib.decompressobj(31)
        elif self._compression == "xz":
            self._engine = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
        else:
            self._engine = bz2.BZ2Decompressor()
        return True

    def _pull(self, num_bytes: int) -> bytes:
        """Some uncompressed bytes of this member."""
        engine = self._engine
        if self._compression == "gz":
            waiting = engine.unconsumed_tail
        elif not engine.needs_input:
            return bytes(engine.decompress(b"", num_bytes))
        else:
            waiting = b""
        compressed = waiting or self._source.read(_COMPRESSED_BYTES)
        data = bytes(engine.decompress(compressed, num_bytes))
        if not compressed and not data and not engine.eof:
            raise EOFError(f"the {self._compression} data end early")
        return data


class _File(io.RawIOBase):
    """A stream as a file that can be read forward."""

    def __init__(self, source: ByteStream) -> None:
        self._source = source

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, num_bytes: int = -1) -> bytes:
        """At most so many bytes; none at the end."""
        return self._source.read(num_bytes if num_bytes >= 0 else CHUNK_BYTES)


def as_file(stream: ByteStream) -> io.RawIOBase:
    """A stream as a Python file, for libraries that want one."""
    return _File(stream)
