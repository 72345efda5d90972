"""Text of bytes as documents: decoding to UTF-8, one document a line or a file, and long ones cut at whitespace."""

import codecs
from collections.abc import Iterator

from declutr.pipeline.readers.corpus import END, Document, ReadFailure, Record
from declutr.pipeline.readers.streams import CHUNK_BYTES, READ_ERRORS, ByteStream

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # starts like UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LARGEST_GROWTH = 2
"""Largest growth: two bytes of UTF-16 become at most three of UTF-8."""
_LEAST_BYTES = 4
Buffer = bytes | bytearray | memoryview
_SPACES = (b" ", b"\n", b"\t", b"\r")
_CONTINUATION_BYTES = 3
_WIDE_SHARE = 4
"""A string is wide if at least one of this many characters is NUL."""


def decode(raw: Buffer, source: str, offset: int) -> Record:
    """A document of these bytes; a failure if they are not UTF-8 or hold NUL bytes, which text never does.

    A byte order mark at the start of a file is removed.
    """
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        message = f"byte {error.start} of the document: {error.reason}"
        return ReadFailure(reason="invalid_utf8", source=source, offset=offset, message=message)
    if "\0" in text:
        return nul_bytes(source, offset)
    return Document(text.removeprefix("\ufeff") if offset == 0 else text, source, offset)


def nul_bytes(source: str, offset: int) -> ReadFailure:
    """The failure of a document with NUL bytes."""
    message = "NUL bytes: UTF-16 or UTF-32 without a byte order mark (convert it to UTF-8), or no text at all"
    return ReadFailure(reason="nul_bytes", source=source, offset=offset, message=message)


def is_wide(text: str) -> bool:
    """Returns True if a string has enough NUL characters to be UTF-16 or UTF-32 that was decoded as UTF-8."""
    return "\0" in text and text.count("\0") * _WIDE_SHARE >= len(text)


def cut(window: bytes | bytearray, max_bytes: int) -> int:
    """Length of the first piece of bytes longer than `max_bytes`, in (0, max_bytes].

    The cut is after the last whitespace, or between two characters if there is none.
    """
    last_space = max(window.rfind(space, 0, max_bytes) for space in _SPACES)
    return last_space + 1 if last_space >= 0 else character_start(window, max_bytes)


def character_start(window: bytes | bytearray, position: int) -> int:
    """The last position up to this one at which a UTF-8 character can start; the position itself if none can."""
    for start in range(position, max(0, position - _CONTINUATION_BYTES - 1), -1):
        if window[start] & 0xC0 != 0x80:
            return start
    return position


def documents(raw: Buffer, source: str, row: int, max_bytes: int) -> Iterator[Record]:
    """The document of one row of a table, in pieces if longer than `max_bytes`; the offset is always the row."""
    view = memoryview(raw)
    start = 0
    while len(view) - start > max_bytes:
        # One byte beyond the limit shows whether the limit falls between two characters.
        length = cut(bytes(view[start : start + max_bytes + 1]), max_bytes)
        yield decode(view[start : start + length], source, row)
        start += length
    yield decode(view[start:], source, row)


def encoding_of(head: bytes) -> str | None:
    """The encoding of the byte order mark at the start of a file, unless it is UTF-8."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)


def as_utf8(stream: ByteStream, encoding: str) -> ByteStream:
    """The stream in UTF-8, without its byte order mark. Positions count from 0 in what it gives.

    A lone surrogate becomes bytes that are not UTF-8, so that it affects only its document. If the bytes are not
    characters, or end within one, the stream breaks off with an OSError.
    """
    stream.skip(len(next(mark for mark, name in _MARKS if name == encoding)))
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")

    def read(num_bytes: int) -> bytes:
        while True:
            raw = stream.read(max(_LEAST_BYTES, num_bytes // _LARGEST_GROWTH))
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise OSError(f"no {encoding.upper()}, as the byte order mark says: {error.reason}") from error
            if text or not raw:
                return text.encode("utf-8", "surrogatepass")

    return ByteStream(read, 0)


def lines(
    stream: ByteStream, stop: int, max_bytes: int, *, keep: bool = True
) -> Iterator[tuple[bytes | bytearray, int, bool]]:
    r"""Lines whose first byte is before `stop`, without their `\n`.

    A line longer than `max_bytes` comes in pieces cut at whitespace, or, without `keep`, in empty pieces.

    Yields:
        Bytes (valid until the next iteration), position of the first byte, and True if the line continues.
    """
    buffer = bytearray()
    start = stream.position
    goes_on = False
    while (goes_on or start < stop) and (chunk := stream.read(CHUNK_BYTES)):
        begin = 0
        if buffer or goes_on:
            end = chunk.find(b"\n")
            buffer += chunk if end < 0 else memoryview(chunk)[:end]
            while len(buffer) > max_bytes:
                length = cut(buffer, max_bytes) if keep else len(buffer)
                yield buffer[:length] if keep else b"", start, True
                del buffer[:length]
                start += length
                goes_on = True
            if end < 0:
                continue
            begin = end + 1
            line, buffer = buffer, bytearray()
            yield line, start, False
            start += len(line) + 1
            goes_on = False
        last = chunk.rfind(b"\n", begin)
        if last >= 0:
            for piece in chunk[begin:last].split(b"\n"):
                if start >= stop:
                    return
                rest, at = piece, start
                while len(rest) > max_bytes and keep:
                    length = cut(rest, max_bytes)
                    yield rest[:length], at, True
                    rest, at = rest[length:], at + length
                yield rest, at, False
                start += len(piece) + 1
            begin = last + 1
        buffer += memoryview(chunk)[begin:]
    if goes_on or (buffer and start < stop):
        while len(buffer) > max_bytes and keep:
            length = cut(buffer, max_bytes)
            yield buffer[:length], start, True
            del buffer[:length]
            start += length
        yield buffer, start, False


def read_text(stream: ByteStream, source: str, max_bytes: int, stop: int = END) -> Iterator[Record]:
    """One document a line."""
    offset = stream.position
    try:
        for raw, offset, _ in lines(stream, stop, max_bytes):
            yield decode(raw, source, offset)
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)


def read_text_file(stream: ByteStream, source: str, max_bytes: int) -> Iterator[Record]:
    """One document a file. A file that breaks off gives a failure, not a truncated document."""
    buffer = bytearray()
    offset = 0
    try:
        while chunk := stream.read(CHUNK_BYTES):
            buffer += chunk
            while len(buffer) > max_bytes:
                length = cut(buffer, max_bytes)
                yield decode(buffer[:length], source, offset)
                del buffer[:length]
                offset += length
        yield decode(buffer, source, offset)
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)


def unreadable(error: Exception, source: str, offset: int) -> ReadFailure:
    """The failure for the rest of a source after this offset."""
    message = f"{error or type(error).__name__} (the rest of {source} is lost)"
    return ReadFailure(reason="unreadable", source=source, offset=offset, message=message)
