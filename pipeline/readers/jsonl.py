"""Reader of JSON lines: the text of one object a line, also of one that is longer than a document may be."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from declutr.pipeline.readers.corpus import END, NO_TEXT, Document, Names, ReadFailure, Record, missing
from declutr.pipeline.readers.plain_text import Buffer, character_start, decode, is_wide, lines, nul_bytes, unreadable
from declutr.pipeline.readers.streams import READ_ERRORS, ByteStream

MAX_HELD_BYTES = 1 << 29
"""Largest content that is held in memory as a whole: a line of JSON, or a Parquet file in an archive."""

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE_BYTES = 6
_CUT_BYTES = 2 * _ESCAPE_BYTES


def json_lines(stream: ByteStream, source: str, stop: int) -> Iterator[tuple[bytes | bytearray, int] | ReadFailure]:
    """Lines whose first byte is before `stop`, with their positions; a line that is too long is one failure.

    The bytes of a line are valid until the next iteration. If the stream breaks off, its rest is the last failure.
    """
    offset = stream.position
    too_large = False
    try:
        for raw, offset, continues in lines(stream, stop, MAX_HELD_BYTES, keep=False):
            if not (continues or too_large):
                yield raw, offset
                continue
            if not too_large:
                message = f"the line is longer than {MAX_HELD_BYTES >> 20} MiB"
                yield ReadFailure(reason="too_large", source=source, offset=offset, message=message)
            too_large = continues
    except READ_ERRORS as error:
        yield unreadable(error, source, offset)


def read_jsonl(stream: ByteStream, source: str, names: Names, max_bytes: int, stop: int = END) -> Iterator[Record]:
    """One JSON object a line, with the text under `names`."""
    parse = _decoder(names, str if len(names) == 1 else str | None).decode
    for line in json_lines(stream, source, stop):
        if isinstance(line, ReadFailure):
            yield line
            continue
        raw, offset = line
        if len(raw) > max_bytes:
            yield from _json_pieces(raw, source, offset, names, max_bytes)
            continue
        try:
            text = _joined(msgspec.structs.astuple(parse(raw)), names)
        except (ValueError, RecursionError):
            yield _explained(bytes(raw), source, offset, names)
        else:
            yield nul_bytes(source, offset) if is_wide(text) else Document(text, source, offset)


def _joined(values: Sequence[str | None], names: Names) -> str:
    """The text of the values under these keys, empty ones and null left out.

    Raises:
        ValueError: all are null.
    """
    if all(value is None for value in values):
        raise ValueError(f"no text under {' and '.join(map(repr, names))}: null")
    return "\n".join(filter(None, values))


@lru_cache
def _decoder(names: Names, kind: Any) -> Any:
    """A decoder of JSON objects to the values under `names`, in order; other keys are checked and ignored."""
    fields = [f"value{number}" for number in range(len(names))]
    struct = msgspec.defstruct("Line", [(name, kind) for name in fields], rename=dict(zip(fields, names, strict=True)))
    return msgspec.json.Decoder(struct)


def _explained(line: bytes, source: str, offset: int, names: Names) -> Record:
    """The record of a line that msgspec refused, read with Python's json, which allows NaN and explains errors.

    A blank line is an empty document, so that totals close.
    """
    record, value = explained_object(line, source, offset, names[0])
    if value is None:
        return record
    if problem := missing(names, sorted(value), "key"):
        return ReadFailure(reason=NO_TEXT, source=source, offset=offset, message=problem)
    values = [value[name] for name in names]
    for name, part in zip(names, values, strict=True):
        if not isinstance(part, str) and (part is not None or not any(values)):
            return _no_text(source, offset, name, f"it is {json_kind(json.dumps(part)[:1])}")
    text = _joined(values, names)
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
        problem = f"the line is {json_kind(record.text.strip()[:1])}, not an object"
        return _no_text(source, offset, text_field, problem), None
    return record, value


def json_kind(start: str) -> str:
    """The kind of JSON value that starts with this character."""
    return {"n": "null", "t": "true", "f": "false", "[": "a list", "{": "an object", '"': "a string"}.get(
        start, "a number"
    )


def _no_text(source: str, offset: int, text_field: str, problem: str) -> ReadFailure:
    message = f"no text under {text_field!r}: {problem}"[:200]
    return ReadFailure(reason=NO_TEXT, source=source, offset=offset, message=message)


def _json_pieces(line: Buffer, source: str, offset: int, names: Names, max_bytes: int) -> Iterator[Record]:
    """The document of a long line, unescaped piece by piece, so that memory holds the line once, as bytes.

    The offset of a piece is its place in the file; that of a later piece of joined texts only lies within the line.
    """
    whole = line
    if offset == 0 and line[:3] == _BOM:
        line = memoryview(line)[3:]
    try:
        raws = msgspec.structs.astuple(_decoder(names, msgspec.Raw).decode(line))
    except msgspec.ValidationError as error:
        yield _no_text(source, offset, " and ".join(names), str(error))
        return
    except (ValueError, RecursionError) as error:
        reason = "invalid_utf8" if _SURROGATE.search(line) else "invalid_json"
        yield ReadFailure(reason=reason, source=source, offset=offset, message=str(error))
        return
    strings = []
    for name, string in zip(names, [memoryview(raw) for raw in raws], strict=True):
        quote = string[:1].tobytes()
        if quote == b'"':
            strings.append(string[1:-1])
        elif quote != b"n" or len(names) == 1 or (name == names[-1] and not strings):
            yield _no_text(source, offset, name, f"it is {json_kind(quote.decode('latin-1'))}")
            return
    string = strings[0] if len(names) == 1 else memoryview(b"\\n".join(part for part in strings if len(part)))
    first = _address(string) - _address(whole) if len(names) == 1 else 0
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
