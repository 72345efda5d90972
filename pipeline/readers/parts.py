"""Reading of one part, with a measure of its progress."""

import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pyarrow as pa

from declutr.common.stores.address import is_remote
from declutr.pipeline.readers.blobs import read_parquet_blobs
from declutr.pipeline.readers.corpus import END, Part, ReadFailure, Record
from declutr.pipeline.readers.fields import read_json_fields, read_parquet_fields
from declutr.pipeline.readers.files import Rules, read_archive, read_stream
from declutr.pipeline.readers.inputs import open_input, stream_of
from declutr.pipeline.readers.jsonl import read_jsonl
from declutr.pipeline.readers.plain_text import read_text, unreadable
from declutr.pipeline.readers.streams import (
    BLOCK_BYTES,
    READ_ERRORS,
    Allowance,
    ByteStream,
    compression_of,
    decompressed,
)
from declutr.pipeline.readers.tables import Rows, read_arrow_batches, read_parquet


class Meter:
    """Input bytes of a part that were consumed; the reader of the part sets `measure`."""

    def __init__(self) -> None:
        self.measure: Callable[[], float] = lambda: 0.0


def read_part(part: Part, rules: Rules, meter: Meter) -> Iterator[Record]:
    """Every document and failure of a part of a file, in order."""
    if part.format == "lost":
        yield ReadFailure(reason="unreadable", source=part.source, offset=0, message=_why_lost(part.path))
        return
    try:
        file = open_input(part.path, count=False)
    except READ_ERRORS as error:
        yield unreadable(error, part.source, part.start)
        return
    with file:
        match part.format:
            case "parquet" | "arrow":
                yield from _read_table(part, file, rules, meter)
            case "tar":
                yield from _read_tar(part, file, rules, meter)
            case "stream":
                stream = stream_of(file, part.path)
                meter.measure = lambda: stream.position
                yield from read_stream(stream, part.source, rules)
            case _:
                yield from _read_range(part, file, rules, meter)


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


def _read_table(part: Part, file: BinaryIO, rules: Rules, meter: Meter) -> Iterator[Record]:
    """Row groups or record batches [start, stop)."""
    rows = Rows()
    meter.measure = lambda: part.num_bytes * rows.share
    pieces = range(part.start, part.stop)
    if rules.blobs:
        groups = None if part.stop == END else pieces
        yield from read_parquet_blobs(file, part.source, rules.blobs, rules.max_bytes, groups, rows)
    elif rules.keys:
        yield from read_parquet_fields(file, part.source, rules.keys, rules.max_bytes, rows)
    elif part.format == "parquet":
        groups = None if part.stop == END else pieces
        yield from read_parquet(file, part.source, rules.text_names, rules.max_bytes, groups, rows)
    elif is_remote(part.path):
        yield from read_arrow_batches(file, part.source, rules.text_names, rules.max_bytes, pieces, rows)
    else:
        try:
            mapped = pa.memory_map(part.path)
        except READ_ERRORS as error:
            yield unreadable(error, part.source, part.start)
            return
        with mapped:
            yield from read_arrow_batches(mapped, part.source, rules.text_names, rules.max_bytes, pieces, rows)


def _read_tar(part: Part, file: BinaryIO, rules: Rules, meter: Meter) -> Iterator[Record]:
    """The members that start in [start, stop) of the archive; a compressed archive is read from its beginning."""
    try:
        stream = stream_of(file, part.path)
        allowance = Allowance(stream)
        compression = compression_of(stream.peek(BLOCK_BYTES))
        if compression:
            stream = decompressed(stream, compression, allowance)
        stream.skip(part.start)
    except READ_ERRORS as error:
        yield unreadable(error, part.source, part.start)
        return
    scale = part.num_bytes / (part.stop - part.start) if part.stop != END else 1.0
    meter.measure = lambda: scale * (stream.position - part.start)
    yield from read_archive(stream, part.source, rules, part.stop, allowance)


def _read_range(part: Part, file: BinaryIO, rules: Rules, meter: Meter) -> Iterator[Record]:
    """The lines whose first byte is in [start, stop)."""
    try:
        stream = stream_of(file, part.path, max(0, part.start - 1), part.stop)
        if part.start > 0:
            # A line across the cut belongs to the range before: start one byte earlier and skip that line.
            _skip_line(stream)
    except READ_ERRORS as error:
        yield unreadable(error, part.source, part.start)
        return
    meter.measure = lambda: stream.position - part.start
    if part.format == "jsonl" and rules.keys:
        records = read_json_fields(stream, part.source, rules.keys, rules.max_bytes, part.stop)
    elif part.format == "jsonl":
        records = read_jsonl(stream, part.source, rules.text_names, rules.max_bytes, part.stop)
    else:
        records = read_text(stream, part.source, rules.max_bytes, part.stop)
    record: Record | None = None
    for record in records:
        yield record
    if stream.position < part.stop and not (isinstance(record, ReadFailure) and record.reason == "unreadable"):
        short = EOFError(f"the file ends {part.stop - stream.position} bytes earlier than when it was looked for")
        yield unreadable(short, part.source, stream.position)


def _skip_line(stream: ByteStream) -> None:
    """Moves the stream past the next newline, or to its end."""
    while chunk := stream.read():
        found = chunk.find(b"\n")
        if found >= 0:
            stream.unread(chunk[found + 1 :])
            return
