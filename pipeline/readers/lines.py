"""Text as UTF-8, and documents of lines, of whole files and of JSON Lines; long ones are cut at whitespace."""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec
import numpy as np

from declutr.pipeline.readers.corpus import (
    NO_TEXT,
    Document,
    Names,
    ReadFailure,
    Record,
    Records,
    failed,
    missing,
    unreadable,
)
from declutr.pipeline.readers.streams import CHUNK_BYTES, READ_ERRORS, Body, ByteStream, bounded_content

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # starts like UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LARGEST_GROWTH = 2  # largest growth: two bytes of UTF-16 become at most three of UTF-8
_LEAST_BYTES = 4  # a character of UTF-32
Buffer = bytes | bytearray | memoryview
_SPACES = (b" ", b"\n", b"\t", b"\r")
_HEAD_BYTES, _LEAST_LINES = 1 << 18, 2  # a single line may describe the others
_CONTINUATION_BYTES = 3  # of the longest character


def decode(raw: Buffer, source: str, offset: int, cut: bool = False) -> Record:
    """A document of these bytes, without a byte order mark of a file; a failure if not UTF-8, or with NUL bytes."""
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError as error:
        return failed("invalid_utf8", source, offset, f"byte {error.start} of the document: {error.reason}")
    if "\0" in text:
        return nul_bytes(source, offset)
    return Document(text.removeprefix("\ufeff") if offset == 0 else text, source, offset, cut=cut)


def nul_bytes(source: str, offset: int) -> ReadFailure:
    """The failure of a document with NUL bytes."""
    message = "NUL bytes: UTF-16 or UTF-32 without a byte order mark (convert it to UTF-8), or no text at all"
    return failed("nul_bytes", source, offset, message)


def cut(window: bytes | bytearray, max_bytes: int) -> int:
    """Length of the first piece of longer bytes, in (0, max_bytes]: to the last whitespace, else between characters."""
    last_space = max(window.rfind(space, 0, max_bytes) for space in _SPACES)
    return last_space + 1 if last_space >= 0 else character_start(window, max_bytes)


def character_start(window: bytes | bytearray, position: int) -> int:
    """The last position up to this one at which a UTF-8 character can start; the position itself if none can."""
    for start in range(position, max(0, position - _CONTINUATION_BYTES - 1), -1):
        if window[start] & 0xC0 != 0x80:
            return start
    return position


def documents(raw: Buffer, source: str, row: int, max_bytes: int) -> Records:
    """The document of one row of a table, in pieces if longer than `max_bytes`; the offset is always the row."""
    for piece, _, goes_on in _cut_line(memoryview(raw), 0, max_bytes):
        yield decode(piece, source, row, goes_on)


def encoding_of(head: bytes) -> str | None:
    """The encoding of the byte order mark at the start of a file, unless it is UTF-8."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)


def keys_of_lines(file: BinaryIO, num_bytes: int) -> list[str]:
    """Keys of the objects in whole lines at both ends of JSON Lines; none if there are under two, or other values."""
    values: list[Any] = []
    try:
        for start in dict.fromkeys((0, max(0, num_bytes - _HEAD_BYTES))):
            file.seek(start)
            lines = file.read(_HEAD_BYTES).split(b"\n")[start > 0 : None if start + _HEAD_BYTES >= num_bytes else -1]
            values += [json.loads(line) for line in lines if line.strip()] or [None]  # a line longer than that
    except (ValueError, RecursionError):  # counted when the file is read
        return []
    if len(values) < _LEAST_LINES or not all(isinstance(value, dict) for value in values):
        return []
    return list(dict.fromkeys(key for value in values for key in value))


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
                text = decoder.decode(raw, final=not raw)  # final: an end within a character is an error
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
                if len(piece) > max_bytes and keep:  # JSON is not cut here, because its pieces would not parse
                    yield from _cut_line(piece, start, max_bytes)
                else:
                    yield piece, start, False
                start += len(piece) + 1
            begin = last + 1
        buffer += memoryview(chunk)[begin:]
    if goes_on or (buffer and start < stop):
        yield from _cut_line(buffer, start, max_bytes if keep else len(buffer))


def _cut_line(line: Any, start: int, max_bytes: int) -> Iterator[tuple[Any, int, bool]]:
    """The pieces of a line or text that was read to its end, as `lines` yields them."""
    done = 0
    while len(line) - done > max_bytes:
        # One byte beyond the limit shows whether the limit falls between two characters.
        length = cut(bytes(line[done : done + max_bytes + 1]), max_bytes)
        yield line[done : done + length], start + done, True
        done += length
    yield line[done:] if done else line, start + done, False  # a line of JSON is not copied


def read_text(body: Body) -> Records:
    """One document a line."""
    offset = body.stream.position
    try:
        for raw, offset, goes_on in lines(body.stream, body.stop, body.rules.max_bytes):
            yield decode(raw, body.source, offset, goes_on)
    except READ_ERRORS as error:
        yield unreadable(error, body.source, offset)


def read_text_file(body: Body) -> Records:
    """One document a file. A file that breaks off gives a failure, not a truncated document."""
    buffer, offset, max_bytes = bytearray(), 0, body.rules.max_bytes
    try:
        while chunk := body.stream.read(CHUNK_BYTES):
            buffer += chunk
            while len(buffer) > max_bytes:
                length = cut(buffer, max_bytes)
                yield decode(buffer[:length], body.source, offset, cut=True)
                del buffer[:length]
                offset += length
        yield decode(buffer, body.source, offset)
    except READ_ERRORS as error:
        yield unreadable(error, body.source, offset)


# Largest content that is held in memory as a whole: a line of JSON, or a Parquet file in an archive.
MAX_HELD_BYTES = 1 << 29

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE_BYTES = 6  # of \uXXXX
_CUT_BYTES = 2 * _ESCAPE_BYTES  # a pair of surrogates is two escapes


def json_lines(body: Body) -> Iterator[tuple[bytes | bytearray, int] | ReadFailure]:
    """Lines whose first byte is before `stop`, with their positions; a line that is too long is one failure.

    The bytes of a line are valid until the next iteration. If the stream breaks off, its rest is the last failure.
    """
    offset = body.stream.position
    too_large = False
    try:
        for raw, offset, continues in lines(body.stream, body.stop, MAX_HELD_BYTES, keep=False):
            if not (continues or too_large):
                yield raw, offset
                continue
            if not too_large:
                yield failed("too_large", body.source, offset, f"the line is longer than {MAX_HELD_BYTES >> 20} MiB")
            too_large = continues
    except READ_ERRORS as error:
        yield unreadable(error, body.source, offset)


def json_values(body: Body) -> Iterator[tuple[bytes | bytearray, int] | ReadFailure]:
    """The values of an array, or one value, of any number of lines, with their positions; held in memory whole."""
    excess = f"JSON of several lines and more than {MAX_HELD_BYTES >> 20} MiB"
    if isinstance(data := bounded_content(body, MAX_HELD_BYTES, excess), ReadFailure):
        yield data
        return
    try:
        value = memoryview(data.removeprefix(_BOM))
        values = [value]
        if data.removeprefix(_BOM).lstrip().startswith(b"["):
            values = [memoryview(raw) for raw in msgspec.json.decode(value, type=list[msgspec.Raw])]
    except (ValueError, RecursionError) as error:
        yield failed("invalid_json", body.source, 0, f"{error}; an array of objects, or an object a line, is read")
    else:
        yield from ((bytes(raw), _address(raw) - _address(value)) for raw in values)


def read_jsonl(body: Body, values: Callable[..., Iterator[Any]] = json_lines) -> Records:
    """One JSON object a line (or value), with the text under the names of the rules."""
    source, names, max_bytes = body.source, body.rules.text_names, body.rules.max_bytes
    parse = json_decoder(names, str | int if body.rules.numbers else str if len(names) == 1 else str | None).decode
    for line in values(body):
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
            yield _explained(bytes(raw), source, offset, names, body.rules.numbers)
        else:
            yield nul_bytes(source, offset) if "\0" in text else Document(text, source, offset)


def _joined(values: Sequence[str | None], names: Names) -> str:
    """The text of the values under these keys, empty ones and null left out."""
    if all(value is None for value in values):
        raise ValueError(f"no text under {' and '.join(map(repr, names))}: null")
    return "\n".join(filter(None, values)) if len(values) > 1 else str(values[0])


@lru_cache
def json_decoder(names: Names, kind: Any, *default: Any) -> Any:
    """A decoder of JSON objects to the values of `names`; absent ones are `default` or an error; others are checked."""
    fields = [f"value{number}" for number in range(len(names))]
    values: list[Any] = [(name, kind, *default) for name in fields]
    return msgspec.json.Decoder(msgspec.defstruct("Line", values, rename=dict(zip(fields, names, strict=True))))


def _explained(line: bytes, source: str, offset: int, names: Names, numbers: bool) -> Record:
    """A line that msgspec refused, read by Python's json, which allows NaN, explains errors; a blank one is empty."""
    record, value = explained_object(line, source, offset, names[0])
    if value is None:
        return record
    if problem := missing(names, sorted(value), "key"):
        return failed(NO_TEXT, source, offset, problem)
    values = [str(value[name]) if numbers and type(value[name]) is int else value[name] for name in names]
    for name, part in zip(names, values, strict=True):
        if not isinstance(part, str) and (part is not None or not any(values)):
            return _no_text(source, offset, name, f"it is {json_kind(json.dumps(part)[:1])}")
    text = _joined(values, names)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escaped lone surrogate is valid JSON, but not Unicode text
        return failed("invalid_utf8", source, offset, error.reason)
    return nul_bytes(source, offset) if "\0" in text else Document(text, source, offset)


def explained_object(line: bytes, source: str, offset: int, text_field: str) -> tuple[Record, dict[str, Any] | None]:
    """The JSON object of a line, read with Python's json; None, and the failure or blank document, if it is none."""
    record = decode(line, source, offset)
    if isinstance(record, ReadFailure) or not record.text.strip():
        return record, None
    try:
        # Python would refuse a number of 5,000 digits.
        value = json.loads(record.text, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))
    except (ValueError, RecursionError) as error:
        return failed("invalid_json", source, offset, str(error)), None
    if not isinstance(value, dict):
        start = record.text.strip()[:1]
        whole = "; if the file is one JSON array, set corpus.format to json" if (start, offset) == ("[", 0) else ""
        problem = f"the line is {json_kind(start)}, not an object{whole}"
        return _no_text(source, offset, text_field, problem), None
    return record, value


def json_kind(start: str) -> str:
    """The kind of JSON value that starts with this character."""
    return {"n": "null", "t": "true", "f": "false", "[": "a list", "{": "an object", '"': "a string"}.get(
        start, "a number"
    )


def _no_text(source: str, offset: int, text_field: str, problem: str) -> ReadFailure:
    return failed(NO_TEXT, source, offset, f"no text under {text_field!r}: {problem}"[:200])


def _json_pieces(line: Buffer, source: str, offset: int, names: Names, max_bytes: int) -> Records:
    """The document of a long line, unescaped piece by piece, so that memory holds the line once, as bytes.

    The offset of a piece is its place in the file; that of a later piece of joined texts only lies within the line.
    """
    whole = line
    if offset == 0 and line[:3] == _BOM:
        line = memoryview(line)[3:]
    try:
        raws = msgspec.structs.astuple(json_decoder(names, msgspec.Raw).decode(line))
    except msgspec.ValidationError as error:
        yield _no_text(source, offset, " and ".join(names), str(error))
        return
    except (ValueError, RecursionError) as error:
        reason = "invalid_utf8" if _SURROGATE.search(line) else "invalid_json"  # msgspec refuses a lone one
        yield failed(reason, source, offset, str(error))
        return
    strings = []
    for name, string in zip(names, [memoryview(raw) for raw in raws], strict=True):
        quote = string[:1].tobytes()
        if quote == b'"':
            strings.append(string[1:-1])
        elif quote != b"n" or len(names) == 1 or (name == names[-1] and not strings):
            yield _no_text(source, offset, name, f"it is {json_kind(quote.decode('latin-1'))}")
            return
    # An escape, because pieces are unescaped below.
    string = strings[0] if len(names) == 1 else memoryview(b"\\n".join(part for part in strings if len(part)))
    first = _address(string) - _address(whole) if len(names) == 1 else 0
    start = 0
    while start < len(string) or start == 0:  # an empty text is a document, too
        window = bytes(string[start : start + max_bytes + 1])
        length = len(window) if len(window) <= max_bytes else _json_cut(window, max_bytes)
        at = offset if start == 0 else offset + first + start
        try:
            text = msgspec.json.decode(b'"' + window[:length] + b'"', type=str)
            piece = Document(text, source, at, cut=start + length < len(string))
            yield nul_bytes(source, at) if "\0" in text else piece
        except ValueError as error:
            yield failed("invalid_utf8", source, at, str(error))
        start += max(1, length)  # 1 ends the round of an empty text


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
