"""Readers of line formats (one document a line) and of one document a file."""

from collections.abc import Iterator

from declutr.pipeline.readers.corpus import END, ReadFailure, Record
from declutr.pipeline.readers.pieces import cut, decode
from declutr.pipeline.readers.streams import CHUNK_BYTES, READ_ERRORS, ByteStream


def lines(
    stream: ByteStream, stop: int, max_bytes: int, *, keep: bool = True
) -> Iterator[tuple[bytes | bytearray, int, bool]]:
    r"""Lines whose first byte is before `stop`, without their `\n`.

    A line longer than `max_bytes` comes in pieces cut at whitespace, or, without `keep`, in empty pieces.

    Yields:
        Bytes (valid until the next iteration), position of the first byte, and True if the line continues.
    """
    held = bytearray()
    start = stream.position
    goes_on = False
    while (goes_on or start < stop) and (chunk := stream.read(CHUNK_BYTES)):
        begin = 0
        if held or goes_on:
            end = chunk.find(b"\n")
            held += chunk if end < 0 else memoryview(chunk)[:end]
            while len(held) > max_bytes:
                length = cut(held, max_bytes) if keep else len(held)
                yield held[:length] if keep else b"", start, True
                del held[:length]
                start += length
                goes_on = True
            if end < 0:
                continue
            begin = end + 1
            line, held = held, bytearray()
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
        held += memoryview(chunk)[begin:]
    if goes_on or (held and start < stop):
        while len(held) > max_bytes and keep:
            length = cut(held, max_bytes)
            yield held[:length], start, True
            del held[:length]
            start += length
        yield held, start, False


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
    held = bytearray()
    offset = 0
    try:
        while chunk := stream.read(CHUNK_BYTES):
            held += chunk
            while len(held) > max_bytes:
                length = cut(held, max_bytes)
                yield decode(held[:length], source, offset)
                del held[:length]
                offset += length
        yield decode(held, source, offset)
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)


def unreadable(error: Exception, source: str, offset: int) -> ReadFailure:
    """The failure for the rest of a source after this offset."""
    message = f"{error or type(error).__name__} (the rest of {source} is lost)"
    return ReadFailure(reason="unreadable", source=source, offset=offset, message=message)
