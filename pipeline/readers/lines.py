"""Readers of line formats (one document a line, plain or JSON) and of one document a file."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from pipeline.readers.corpus import END, Document, ReadFailure, Record
from pipeline.readers.pieces import Buffer, character_start, cut, decode, is_wide, nul_bytes
from pipeline.readers.streams import CHUNK_BYTES, READ_ERRORS, ByteStream

MAX_HELD_BYTES = 1 << 29
"""Largest content that is held in memory as a whole: a line of JSON, or a Parquet file in an archive."""

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE_BYTES = 6
_CUT_BYTES = 2 * _ESCAPE_BYTES


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


def read_jsonl(stream: ByteStream, source: str, text_field: str, max_bytes: int, stop: int = END) -> Iterator[Record]:
    """One JSON object a line, with the text under `text_field`."""
    text_of = _decoder(text_field, str).decode
    offset = stream.position
    too_large = False
    try:
        for raw, offset, continues in lines(stream, stop, MAX_HELD_BYTES, keep=False):
            if continues or too_large:
                if not too_large:
                    message = f"the line is longer than {MAX_HELD_BYTES >> 20} MiB"
                    yield ReadFailure(reason="too_large", source=source, offset=offset, message=message)
                too_large = continues
            elif len(raw) > max_bytes:
                yield from _json_pieces(raw, source, offset, text_field, max_bytes)
            else:
                try:
                    text = text_of(raw).value
                except (ValueError, RecursionError):
                    yield _explained(bytes(raw), source, offset, text_field)
                else:
                    yield nul_bytes(source, offset) if is_wide(text) else Document(text, source, offset)
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)


def unreadable(error: Exception, source: str, offset: int) -> ReadFailure:
    """The failure for the rest of a source after this offset."""
    message = f"{error or type(error).__name__} (the rest of {source} is lost)"
    return ReadFailure(reason="unreadable", source=source, offset=offset, message=message)


@lru_cache
def _decoder(text_field: str, kind: Any) -> Any:
    """A decoder of JSON objects whose `.value` is the value under `text_field`; other keys are checked and ignored."""
    struct = msgspec.defstruct("Line", [("value", kind)], rename={"value": text_field})
    return msgspec.json.Decoder(struct)


def _explained(line: bytes, source: str, offset: int, text_field: str) -> Record:
    """The record of a line that msgspec refused, read with Python's json, which allows NaN and explains errors.

    A blank line is an empty document, so that totals close.
    """
    record, value = explained_object(line, source, offset, text_field)
    if value is None:
        return record
    if text_field not in value:
        return _no_text(source, offset, text_field, f"found {sorted(value)}")
    text = value[text_field]
    if not isinstance(text, str):
        return _no_text(source, offset, text_field, f"it is {json_kind(json.dumps(text)[:1])}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escaped lone surrogate is valid JSON, but not Unicode text
        return ReadFailure(reason="invalid_utf8", source=source, offset=offset, message=str(error.reason))
    return Document(text, source, offset)


def explained_object(line: bytes, source: str, offset: int, text_field: str) -> tuple[Record, dict[str, Any] | None]:
    """The JSON object of a line, read with Python's json; None, and the failure or blank document, if it is none."""
    record = decode(line, source, offset)
    if isinstance(record, ReadFailure) or not record.text.strip():
        return record, None
    try:
        value = json.loads(record.text, parse_int=float)  # Python would refuse a number of 5,000 digits
    except (ValueError, RecursionError) as error:
        return ReadFailure(reason="invalid_json", source=source, offset=offset, message=str(error)), None
    if not isinstance(value, dict):
        found = f"the line is {json_kind(record.text.strip()[:1])}, not an object"
        return _no_text(source, offset, text_field, found), None
    return record, value


def json_kind(start: str) -> str:
    """The kind of JSON value that starts with this character."""
    return {"n": "null", "t": "true", "f": "false", "[": "a list", "{": "an object", '"': "a string"}.get(
        start, "a number"
    )


def _no_text(source: str, offset: int, text_field: str, found: str) -> ReadFailure:
    message = f"no text under {text_field!r}: {found}"[:200]
    return ReadFailure(reason="no_text_field", source=source, offset=offset, message=message)


def _json_pieces(line: Buffer, source: str, offset: int, text_field: str, max_bytes: int) -> Iterator[Record]:
    """The document of a long line, unescaped piece by piece, so that memory holds the line once, as bytes."""
    if offset == 0 and line[:3] == _BOM:
        line = memoryview(line)[3:]
    try:
        raw = _decoder(text_field, msgspec.Raw).decode(line).value
    except msgspec.ValidationError as error:
        yield _no_text(source, offset, text_field, str(error))
        return
    except (ValueError, RecursionError) as error:
        reason = "invalid_utf8" if _SURROGATE.search(line) else "invalid_json"
        yield ReadFailure(reason=reason, source=source, offset=offset, message=str(error))
        return
    string = memoryview(raw)
    if string[:1].tobytes() != b'"':
        yield _no_text(source, offset, text_field, f"it is {json_kind(string[:1].tobytes().decode('latin-1'))}")
        return
    string = string[1:-1]
    first = _address(string) - _address(line)
    start = 0
    while start < len(string) or start == 0:
        window = bytes(string[start : start + max_bytes + 1])
        length = len(window) if len(window) <= max_bytes else _json_cut(window, max_bytes)
        at = offset if start == 0 else offset + first + start
        try:
            text = msgspec.json.decode(b'"' + window[:length] + b'"', type=str)
            yield nul_bytes(source, at) if is_wide(text) else Document(text, source, at)
        except ValueError as error:
            yield ReadFailure(reason="invalid_utf8", source=source, offset=at, message=str(error))
        start += max(1, length)


def _address(buffer: Buffer) -> int:
    """Memory address of the first byte, to find the offset of msgspec's view within the line."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def _json_cut(raw: bytes, max_bytes: int) -> int:
    r"""Length of the first piece of an escaped string; it ends after a space, else between escapes and characters."""
    space = raw.rfind(b" ", 0, max_bytes)
    if space >= 0:
        return space + 1
    end = character_start(raw, max_bytes)
    last = raw.rfind(b"\\", max(0, end - _CUT_BYTES), end)
    first = last
    while first > 0 and raw[first - 1] == ord("\\"):
        first -= 1
    if last < 0 or (last - first) % 2 == 1:  # no escape nearby, or the last backslash is itself escaped
        return end
    length = _ESCAPE_BYTES if raw[last + 1 : last + 2] == b"u" else 2
    escape = raw[last : last + 4].lower()
    if last + length <= end and not escape.startswith((b"\\ud8", b"\\ud9", b"\\uda", b"\\udb")):
        return end
    before = raw[last - _ESCAPE_BYTES : last - 2].lower() if last >= _ESCAPE_BYTES else b""
    pair = last + length > end and before.startswith((b"\\ud8", b"\\ud9", b"\\uda", b"\\udb"))
    return (last - _ESCAPE_BYTES if pair else last) or end
