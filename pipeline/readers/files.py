"""The records of one part: opened, decompressed, its format detected by content and name, read by one of `READERS`."""

import codecs
import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, BinaryIO

import pyarrow as pa

from declutr.common.stores.address import is_remote
from declutr.pipeline.readers.archives import Member, is_tar, members, read_wet
from declutr.pipeline.readers.blobs import LABEL_SUFFIX, document_kind, read_blob, read_label, read_other, with_labels
from declutr.pipeline.readers.corpus import (
    END,
    FIELD_FORMATS,
    JSON_SUFFIX,
    SUFFIXES,
    TAR_SUFFIX,
    Format,
    Part,
    ReadFailure,
    Record,
    Records,
    Rules,
    bare_suffix,
    failed,
    is_hidden,
    unreadable,
)
from declutr.pipeline.readers.lines import as_utf8, encoding_of, json_values, read_jsonl, read_text, read_text_file
from declutr.pipeline.readers.rows import read_json_fields
from declutr.pipeline.readers.skipped import advice_on
from declutr.pipeline.readers.streams import (
    BLOCK_BYTES,
    READ_ERRORS,
    Allowance,
    Body,
    ByteStream,
    compression_of,
    decompressed,
    open_input,
    stream_of,
)
from declutr.pipeline.readers.tables import (
    ARROW_FILE,
    DELIMITERS,
    read_arrow_batches,
    read_arrow_stream,
    read_delimited,
    read_forward_parquet,
    read_parquet,
)

MAX_DEPTH = 4  # largest depth of nested archives, each of which may be compressed; OpenWebText has two levels
_IN_UTF8 = ("jsonl", "json", "text", "text_file", "csv", "tsv", "document")

JSON_HEAD_BYTES = BLOCK_BYTES << 12  # 2 MiB; a longer first object is data, as no description is
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # tabs, newlines and form feeds are text
_PARQUET = b"PAR1"


class Head:
    """The first bytes of a file as they are; `format` is for those that are neither compressed nor an archive."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name, self.suffix = data, name, bare_suffix(name)

    @classmethod
    def of(cls, stream: ByteStream, name: str, num_bytes: int = BLOCK_BYTES) -> "Head":
        """This many bytes, or as many as the format needs: of a .json and without an ending, the first object."""
        head = cls(stream.head(num_bytes), name)
        while (
            head.suffix in ("", JSON_SUFFIX)
            and len(head.data) == num_bytes < JSON_HEAD_BYTES
            and head._object == ({}, True)
        ):
            num_bytes *= 8
            head = cls(stream.head(num_bytes), name)
        return head

    def format(self, rules: Rules, *, inside: bool) -> Format | None:
        """The format of content that is not an archive; `inside` one, a .txt is a text."""
        is_parquet = self.data.startswith(_PARQUET)
        if rules.blobs:
            if is_parquet or self.suffix in rules.blobs.suffixes:
                return "parquet" if is_parquet else "blob"
            return None if not inside else "label" if self.suffix == LABEL_SUFFIX else "other"
        if rules.format:
            return rules.format
        if is_parquet:
            return "parquet"
        if self.data.startswith(ARROW_FILE):
            return "arrow"
        if rules.documents and document_kind(self.data, self.name):
            return "document"
        if self.suffix == JSON_SUFFIX or (not self.suffix and self.has_key(rules)):
            return "json" if self._is_one_value else "jsonl"
        if not self.suffix:
            return "wet" if self.data.startswith(b"WARC/") else "text_file" if self.is_prose() else None
        by_suffix = SUFFIXES.get(self.suffix)
        return ("text_file" if inside else rules.plain) if by_suffix == "text" else by_suffix

    def has_key(self, rules: Rules, cut: bool = True) -> bool:
        """Returns True if the first object has a key that is read, or is longer than a head and `cut` is true."""
        names = rules.keys.values() if rules.keys else rules.text_names
        value, is_cut = self._object
        return any(name in value for name in names) or (cut and is_cut and len(self.data) >= JSON_HEAD_BYTES)

    def is_object(self) -> bool:
        """Returns True if the first line may be an object."""
        return not self._is_one_value and self._text.startswith("{")

    def is_prose(self) -> bool:
        """Returns True if a file begins like text: UTF-8 without control characters, no markup and no program."""
        if encoding_of(self.data):  # a mark says that it is text, whose bytes look like none
            return True
        try:
            # Incremental, because the head may end within a character.
            text = codecs.getincrementaldecoder("utf-8")().decode(self.data)
        except UnicodeDecodeError:
            return False
        return bool(text.strip()) and not _CONTROL.search(text) and not self._text.startswith(("<", "#!", "{", "["))

    @cached_property
    def _text(self) -> str:
        return self.data.decode(encoding_of(self.data) or "utf-8", "replace").lstrip("\ufeff \t\r\n")

    @cached_property
    def _is_one_value(self) -> bool:
        """True for JSON that is an array, or an object over several lines."""
        first = self._text.partition("\n")[0]
        if not first.startswith("{") or first.strip() == "{":
            return first.startswith(("[", "{"))
        try:
            end = json.JSONDecoder().raw_decode(self._text)[1]
        except (ValueError, RecursionError) as error:
            end = getattr(error, "pos", 0)  # up to here, it is the beginning of an object
        return end > len(first) and not self._text.startswith("{", end)  # a brace begins the line behind a cut one

    @cached_property
    def _object(self) -> tuple[dict[str, Any], bool]:
        """The first object of JSON, also of an array; none, and True if it is cut, so that more bytes may show it."""
        text = self._text.removeprefix("[").lstrip()
        if not text.startswith("{"):
            return {}, False
        try:
            value, _ = json.JSONDecoder().raw_decode(text if self._is_one_value else text.partition("\n")[0])
        except RecursionError:  # nested too deeply, which more bytes do not change
            return {}, False
        except ValueError:
            return {}, self._is_one_value or "\n" not in text
        return value, False


class Meter:
    """Input bytes of a part that were consumed; the reader of the part sets `measure`."""

    def __init__(self) -> None:
        self.measure: Callable[[], float] = lambda: 0.0


def read_part(part: Part, rules: Rules, meter: Meter, retry_seconds: float = 0.0) -> Records:
    """Every document and failure of a part of a file, in order."""
    if part.format == "lost":
        yield failed("unreadable", part.source, 0, _why_lost(part.path))
        return
    with ExitStack() as files:
        try:
            records = _opened(part, rules, meter, files.enter_context(open_input(part.path, retry_seconds)), files)
        except READ_ERRORS as error:
            yield unreadable(error, part.source, part.start)
        else:
            yield from records


def _opened(part: Part, rules: Rules, meter: Meter, file: BinaryIO, files: ExitStack) -> Records:
    """The records of a part, whose open file is moved to its start; what else it opens is added to `files`."""
    stream, pieces = stream_of(file, part.path), range(part.start, part.stop)
    match part.format:
        case "parquet" | "arrow":
            body = Body(stream, part.source, rules)
            meter.measure = lambda: part.num_bytes * body.share
            if part.format == "parquet":
                return read_parquet(body, file, None if part.stop == END else pieces)
            # A remote file cannot be mapped.
            mapped = file if is_remote(part.path) else files.enter_context(pa.memory_map(part.path))
            return read_arrow_batches(body, mapped, pieces)
        case "tar":
            allowance, packed = Allowance(stream), compression_of(stream.peek(BLOCK_BYTES))
            members_stream = decompressed(stream, packed, allowance) if packed else stream
            members_stream.skip(part.start)  # a compressed archive has no place to start from
            scale = part.num_bytes / len(pieces) if part.stop != END else 1.0
            meter.measure = lambda: scale * (members_stream.position - part.start)
            return read_archive(members_stream, part.source, rules, part.stop, allowance)
        case "stream":
            meter.measure = lambda: stream.position
            return read_stream(stream, part.source, rules)
        case _:
            # A line across the cut belongs to the range before: start one byte earlier, which shows if a line begins
            # here, and skip that line.
            lines = stream_of(file, part.path, max(0, part.start - 1), part.stop)
            if part.start > 0:
                _skip_line(lines)
            meter.measure = lambda: lines.position - part.start
            return _read_range(part, Body(lines, part.source, rules, part.stop))


def _why_lost(path: str) -> str:
    """The reason why a path could not be read during the search, as far as it can be found now."""
    what = "folder" if os.path.isdir(path) else "link" if os.path.islink(path) else "file"  # noqa: PTH112, PTH114
    try:
        if what == "folder":
            with os.scandir(path):
                pass
        else:
            open_input(path).close()
    except OSError as error:
        return f"{error} (the {what} and everything in it is lost)"
    return f"the {what} could not be read when files were looked for, and its contents are lost"


def _read_range(part: Part, body: Body) -> Records:
    """The lines whose first byte is in [start, stop)."""
    record: Record | None = None
    for record in READERS[part.format](body):  # type: ignore[index]
        yield record
    # The file has shrunk since it was cut, and what is missing must be counted.
    lost_bytes = part.stop - body.stream.position
    if lost_bytes > 0 and not (isinstance(record, ReadFailure) and record.reason == "unreadable"):
        short = EOFError(f"the file ends {lost_bytes} bytes earlier than when it was looked for")
        yield unreadable(short, part.source, body.stream.position)


def _skip_line(stream: ByteStream) -> None:
    """Moves the stream past the next newline, or to its end."""
    while chunk := stream.read():
        newline = chunk.find(b"\n")
        if newline >= 0:
            stream.unread(chunk[newline + 1 :])
            return


def read_stream(
    stream: ByteStream,  # the bytes of the file
    source: str,  # its name; archives and members are joined with "!"
    rules: Rules,  # rules for reading
    *,
    depth: int = 0,  # number of archives around the stream
    compressed: int = 0,  # layers of compression removed since the last archive
    allowance: Allowance | None = None,  # allowance of the file around the stream; None if the stream is the file
) -> Records:
    """The records of a stream that is a whole file."""
    allowance = Allowance(stream) if allowance is None else allowance
    try:
        stream.peek(1)  # not more, because what is before a damage is read
    except READ_ERRORS as error:
        yield unreadable(error, source, 0)
        return
    head = Head.of(stream, source)
    compression = compression_of(head.data)
    archive = is_tar(head.data) or (compression is None and rules.format is None and head.suffix == TAR_SUFFIX)
    if (compression and compressed == MAX_DEPTH) or (archive and depth == MAX_DEPTH):
        yield failed("too_deep", source, 0, f"more than {MAX_DEPTH} archives or compressions in each other")
    elif compression:
        inner = decompressed(stream, compression, allowance)
        yield from read_stream(inner, source, rules, depth=depth, compressed=compressed + 1, allowance=allowance)
    elif archive:
        yield from read_archive(stream, source, rules, END, allowance, depth=depth)
    elif (file_format := head.format(rules, inside=depth > 0)) is None:
        message = f"neither its name nor its content tells a format; corpus.format can{advice_on(source)}"
        yield failed("unknown_format", source, 0, message)
    elif rules.keys and file_format not in FIELD_FORMATS:
        message = f"{file_format} has no columns; premises and hypotheses are read from {', '.join(FIELD_FORMATS)}"
        yield failed("unknown_format", source, 0, message)
    else:
        if file_format in _IN_UTF8 and (encoding := encoding_of(head.data)):
            stream = as_utf8(stream, encoding)
        yield from READERS[file_format](Body(stream, source, rules))


def read_archive(
    stream: ByteStream, source: str, rules: Rules, stop: int, allowance: Allowance, *, depth: int = 0
) -> Records:
    """The records of the members whose headers start before `stop`; labels are with their images or clips."""

    def read() -> Records:
        try:
            for member in members(stream, stop):
                yield from _read_member(member, source, rules, depth, allowance)
        except READ_ERRORS as error:
            yield unreadable(error, source, stream.position)

    return with_labels(read(), rules.max_bytes) if rules.blobs else read()


def _read_member(member: Member, archive: str, rules: Rules, depth: int, allowance: Allowance) -> Records:
    """The records of one member; a member with a dangerous name or of another kind than a file gives a failure."""
    names = member.name.split("/")
    source = f"{archive}!{'/'.join(name for name in names if name not in ('', '.')) or member.name}"
    if member.name.startswith("/") or ".." in names or not member.name:
        yield failed("unsafe_name", f"{archive}!{member.name}", 0, f"{member.name!r} leads out of the archive")
    elif member.kind not in ("file", "folder"):
        yield failed("not_a_file", source, 0, f"{member.name!r} is {member.kind}")
    elif member.kind == "file" and not is_hidden(member.name):
        yield from read_stream(member.data, source, rules, depth=depth + 1, allowance=allowance)


READERS: dict[Format, Callable[[Body], Records]] = {
    "jsonl": lambda body: read_json_fields(body) if body.rules.keys else read_jsonl(body),
    "json": lambda body: (read_json_fields if body.rules.keys else read_jsonl)(body, json_values),
    "text": read_text,
    "text_file": read_text_file,
    "csv": partial(read_delimited, delimiter=DELIMITERS["csv"]),
    "tsv": partial(read_delimited, delimiter=DELIMITERS["tsv"]),
    "wet": read_wet,
    "parquet": read_forward_parquet,
    "arrow": read_arrow_stream,
    "document": read_blob,
    "blob": read_blob,
    "label": read_label,
    "other": read_other,
}  # reader of the content of each format, read forward
