"""Conversion of bytes to documents: UTF-8 is checked, and long documents are cut at whitespace."""

from collections.abc import Iterator

from declutr.pipeline.readers.corpus import Document, ReadFailure, Record

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
    found = max(window.rfind(space, 0, max_bytes) for space in _SPACES)
    return found + 1 if found >= 0 else character_start(window, max_bytes)


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
