"""Format detection, by content and name, and the records of one file or member of an archive."""

import codecs
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from declutr.pipeline.readers.archives import Member, is_tar, members
from declutr.pipeline.readers.blobs import BlobRules, blob_format, read_blob, read_parquet_blobs, with_labels
from declutr.pipeline.readers.corpus import (
    END,
    MIB,
    FilesCorpus,
    Format,
    HubCorpus,
    Names,
    ReadFailure,
    Record,
    names_of,
)
from declutr.pipeline.readers.delimited import DELIMITERS, read_delimited
from declutr.pipeline.readers.fields import (
    FIELD_FORMATS,
    Keys,
    read_delimited_fields,
    read_json_fields,
    read_parquet_fields,
)
from declutr.pipeline.readers.jsonl import MAX_HELD_BYTES, read_jsonl
from declutr.pipeline.readers.names import JSON_SUFFIX, SUFFIXES, TAR_SUFFIX, bare_suffix, is_hidden
from declutr.pipeline.readers.plain_text import as_utf8, encoding_of, read_text, read_text_file, unreadable
from declutr.pipeline.readers.streams import (
    BLOCK_BYTES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    ForwardFile,
    compression_of,
    decompressed,
)
from declutr.pipeline.readers.tables import Rows, read_arrow_stream, read_parquet

MAX_DEPTH = 4
"""Largest depth of nested archives, each of which may be compressed; OpenWebText has two levels."""
_MIN_DOCUMENT_BYTES = 64
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1\0\0"


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for reading the files of a corpus."""

    format: Format | None
    """Format of all files; None detects it for each file."""
    text_names: Names
    """Keys or columns of a text."""
    max_bytes: int
    """Largest document."""
    keys: Keys = field(default_factory=dict)
    """Keys of several values to read instead of a text; none for texts."""
    max_file_bytes: int | None = None
    """Largest file, uncompressed; None: any."""
    blobs: BlobRules | None = None
    """Rules for images or clips; None for texts."""

    @property
    def suffixes(self) -> Collection[str]:
        """Endings of the files that are read."""
        return sorted({*self.blobs.suffixes, ".parquet"}) if self.blobs else SUFFIXES


def rules_of(
    corpus: FilesCorpus | HubCorpus,
    keys: Keys | None = None,
    max_file_bytes: int | None = None,
    blobs: BlobRules | None = None,
) -> Rules:
    """The rules of a corpus."""
    fixed = corpus.format if isinstance(corpus, FilesCorpus) and corpus.format != "auto" else None
    # An escaped surrogate pair takes twelve bytes; the least limit leaves room for a cut between two characters.
    max_bytes = max(_MIN_DOCUMENT_BYTES, int(corpus.max_document_mib * MIB))
    return Rules(fixed, names_of(corpus.text_field), max_bytes, keys or {}, max_file_bytes, blobs)


def format_of(head: bytes, name: str, rules: Rules, *, inside: bool) -> Format | None:
    """The format of uncompressed content that is not an archive."""
    if rules.blobs:
        kind = blob_format(head, name, rules.blobs)
        return kind if inside or kind in ("blob", "parquet") else None
    if rules.format:
        return rules.format
    if head.startswith(_PARQUET):
        return "parquet"
    if head.startswith(_ARROW_FILE):
        return "arrow"
    suffix = bare_suffix(name)
    by_suffix: Format | None = "jsonl" if suffix == JSON_SUFFIX else SUFFIXES.get(suffix)
    if not suffix:
        return "jsonl" if is_json_lines(head, rules) else "text_file" if is_prose(head) else None
    return "text_file" if by_suffix == "text" and inside else by_suffix


def is_json_lines(head: bytes, rules: Rules) -> bool:
    """Returns True if the first line is an object with a key that is read, as far as the head of the file shows it."""
    line, newline, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    names = rules.keys.values() if rules.keys else rules.text_names
    written = [json.dumps(name, ensure_ascii=escaped) for name in names for escaped in (True, False)]
    if not line.startswith(b"{") or not any(key.encode("utf-8", "replace") in line for key in written):
        return False
    try:
        return not newline or isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def is_prose(head: bytes) -> bool:
    """Returns True if a file begins like text: UTF-8 without control characters, no markup and no program."""
    if encoding_of(head):
        return True
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return (
        bool(text.strip())
        and not _CONTROL.search(text)
        and not text.lstrip("\ufeff \r\n\t").startswith(("<", "#!", "{", "["))
    )


def read_stream(
    stream: ByteStream,
    source: str,
    rules: Rules,
    *,
    depth: int = 0,
    compressed: int = 0,
    allowance: Allowance | None = None,
) -> Iterator[Record]:
    """The records of a stream that is a whole file.

    Args:
        stream: the bytes of the file.
        source: its name; archives and members are joined with "!".
        rules: rules for reading.
        depth: number of archives around the stream.
        compressed: layers of compression removed since the last archive.
        allowance: allowance of the file around the stream; None if the stream is the file.
    """
    allowance = Allowance(stream) if allowance is None else allowance
    try:
        head = stream.peek(BLOCK_BYTES)
    except READ_ERRORS as error:
        yield unreadable(error, source, 0)
        return
    compression = compression_of(head)
    archive = is_tar(head) or (compression is None and rules.format is None and bare_suffix(source) == TAR_SUFFIX)
    if (compression and compressed == MAX_DEPTH) or (archive and depth == MAX_DEPTH):
        message = f"more than {MAX_DEPTH} archives or compressions in each other"
        yield ReadFailure(reason="too_deep", source=source, offset=0, message=message)
    elif compression:
        inner = decompressed(stream, compression, allowance)
        yield from read_stream(inner, source, rules, depth=depth, compressed=compressed + 1, allowance=allowance)
    elif archive:
        yield from read_archive(stream, source, rules, END, allowance, depth=depth)
    elif (file_format := format_of(head, source, rules, inside=depth > 0)) is None:
        message = "neither its name nor its content tells a format; corpus.format can"
        yield ReadFailure(reason="unknown_format", source=source, offset=0, message=message)
    else:
        yield from _read(stream, source, rules, file_format, head)


def read_archive(
    stream: ByteStream, source: str, rules: Rules, stop: int, allowance: Allowance, *, depth: int = 0
) -> Iterator[Record]:
    """The records of the members whose headers start before `stop`."""
    records = _read_members(stream, source, rules, stop, allowance, depth)
    yield from with_labels(records, rules.max_bytes) if rules.blobs else records


def _read_members(
    stream: ByteStream, source: str, rules: Rules, stop: int, allowance: Allowance, depth: int
) -> Iterator[Record]:
    """The records of the members whose headers start before `stop`, labels among them."""
    try:
        for member in members(stream, stop):
            yield from _read_member(member, source, rules, depth, allowance)
    except READ_ERRORS as error:
        yield unreadable(error, source, stream.position)


def _read_member(member: Member, archive: str, rules: Rules, depth: int, allowance: Allowance) -> Iterator[Record]:
    """The records of one member; a member with a dangerous name or of another kind than a file gives a failure."""
    names = member.name.split("/")
    source = f"{archive}!{'/'.join(name for name in names if name not in ('', '.')) or member.name}"
    if member.name.startswith("/") or ".." in names or not member.name:
        message = f"{member.name!r} leads out of the archive"
        yield ReadFailure(reason="unsafe_name", source=f"{archive}!{member.name}", offset=0, message=message)
    elif member.kind not in ("file", "folder"):
        yield ReadFailure(reason="not_a_file", source=source, offset=0, message=f"{member.name!r} is {member.kind}")
    elif member.kind == "file" and not is_hidden(member.name):
        yield from read_stream(member.data, source, rules, depth=depth + 1, allowance=allowance)


def _read(stream: ByteStream, source: str, rules: Rules, file_format: Format, head: bytes) -> Iterator[Record]:
    """The records of uncompressed content of a known format."""
    if file_format == "blob" or file_format == "label" or file_format == "other":
        yield from read_blob(stream, source, file_format, rules.max_bytes)
        return
    if file_format not in ("parquet", "arrow") and (encoding := encoding_of(head)):
        stream = as_utf8(stream, encoding)
    if rules.keys and file_format not in FIELD_FORMATS:
        message = f"{file_format} has no columns; premises and hypotheses are read from {', '.join(FIELD_FORMATS)}"
        yield ReadFailure(reason="unknown_format", source=source, offset=0, message=message)
        return
    match file_format:
        case "jsonl" if rules.keys:
            yield from read_json_fields(stream, source, rules.keys, rules.max_bytes)
        case "csv" | "tsv" if rules.keys:
            yield from read_delimited_fields(stream, source, rules.keys, rules.max_bytes, DELIMITERS[file_format])
        case "jsonl":
            yield from read_jsonl(stream, source, rules.text_names, rules.max_bytes)
        case "text":
            yield from read_text(stream, source, rules.max_bytes)
        case "text_file":
            yield from read_text_file(stream, source, rules.max_bytes)
        case "csv" | "tsv":
            yield from read_delimited(stream, source, rules.text_names, rules.max_bytes, DELIMITERS[file_format])
        case "arrow":
            if head.startswith(_ARROW_FILE):
                stream.skip(len(_ARROW_FILE))
            file = pa.PythonFile(ForwardFile(stream), mode="r")
            yield from read_arrow_stream(file, source, rules.text_names, rules.max_bytes)
        case "parquet":
            yield from _read_held_parquet(stream, source, rules)


def _read_held_parquet(stream: ByteStream, source: str, rules: Rules) -> Iterator[Record]:
    """A Parquet file that can only be read forward; it is held in memory, because its directory is at its end."""
    data = bytearray()
    try:
        while len(data) <= MAX_HELD_BYTES and (chunk := stream.read()):
            data += chunk
    except READ_ERRORS as error:
        yield unreadable(error, source, 0)
        return
    if len(data) > MAX_HELD_BYTES:
        message = f"a Parquet file of more than {MAX_HELD_BYTES >> 20} MiB inside an archive or compression"
        yield ReadFailure(reason="too_large", source=source, offset=0, message=message)
    else:
        file = pa.BufferReader(pa.py_buffer(data))
        if rules.blobs:
            yield from read_parquet_blobs(file, source, rules.blobs, rules.max_bytes, None, Rows())
        elif rules.keys:
            yield from read_parquet_fields(file, source, rules.keys, rules.max_bytes, Rows())
        else:
            yield from read_parquet(file, source, rules.text_names, rules.max_bytes, None, Rows())
