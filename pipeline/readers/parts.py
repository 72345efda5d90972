"""Reading of one part, with a measure of its progress."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.common.stores.address import is_remote
from declutr.pipeline.readers.archives import find_members
from declutr.pipeline.readers.blobs import blob_column_problem, read_parquet_blobs
from declutr.pipeline.readers.corpus import END, TEXT_SETTING, Input, Names, Part, ReadFailure, Record, shown_names
from declutr.pipeline.readers.delimited import DELIMITERS, header_problem
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
from declutr.pipeline.readers.tables import TABLE_ERRORS, Rows, column_problem, read_arrow_batches, read_parquet


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
        newline = chunk.find(b"\n")
        if newline >= 0:
            stream.unread(chunk[newline + 1 :])
            return


# Cuts of one file into parts: byte ranges, members of an archive, row groups, record batches.


class Cut(NamedTuple):
    """The parts and the problem of one file."""

    parts: list[Part]
    problem: str | None = None
    """Problem of the file. With parts, reading counts it as a failure; without parts, the corpus is refused."""
    skipped: bool = False
    """True if a search met the file and its format is unknown."""


def cut_archive(
    file: Input, stream: ByteStream, part_bytes: int, max_parts: int, key: Callable[[str], str] | None = None
) -> list[Part]:
    """Parts of consecutive members of an archive. The last part of a broken archive extends to the damage.

    A compressed archive is cut into at most `max_parts`; 1 means that it is not compressed.
    Consecutive members whose names have the same key stay together.
    """
    starts, end = find_members(stream, key)
    size = end or stream.position
    min_bytes = max(part_bytes, -(-size // max_parts)) if max_parts > 1 else part_bytes
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= min_bytes:
            cuts.append(start)
    stops = [*cuts[1:], end or END]
    shares = [file.num_bytes * cut // max(1, size) for cut in cuts[1:]]
    bounds = [0, *shares, file.num_bytes]
    if max_parts == 1:
        bounds = [*cuts, max(cuts[-1], file.num_bytes)]
    return [
        make_part(file, "tar", start, stop, high - low, min(stop, size) - start)
        for start, stop, (low, high) in zip(cuts, stops, pairwise(bounds), strict=True)
    ]


def cut_ranges(file: Input, file_format: str, part_bytes: int) -> list[Part]:
    """Byte ranges of a plain file. A line belongs to the range of its first byte."""
    count = max(1, -(-file.num_bytes // part_bytes))
    cuts = [file.num_bytes * i // count for i in range(count + 1)]
    return [make_part(file, file_format, start, stop, stop - start, stop - start) for start, stop in pairwise(cuts)]


def cut_parquet(file: Input, opened: BinaryIO, names: Names, part_bytes: int, setting: str = TEXT_SETTING) -> Cut:
    """Parts of consecutive row groups of a Parquet file.

    Args:
        file: the file.
        opened: its content.
        names: columns of its texts, or column of its images or clips.
        part_bytes: bytes of the columns in a part.
        setting: setting that names the columns.
    """
    try:
        with pq.ParquetFile(opened) as table:
            metadata = table.metadata
            schema = table.schema_arrow
            problem = (
                column_problem(schema, names) if setting == TEXT_SETTING else blob_column_problem(schema, names[0])
            )
            paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    except TABLE_ERRORS:
        return Cut([make_part(file, "parquet", 0, END, file.num_bytes, file.num_bytes)])
    if problem:
        return _without_text(file, "parquet", setting, names, problem)
    columns = [n for n, path in enumerate(paths) if any(path == name or path.startswith(f"{name}.") for name in names)]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    weights = [sum(max(0, group.column(n).total_uncompressed_size) for n in columns) for group in groups]
    sizes = [max(0, group.total_byte_size) for group in groups]
    return Cut(_grouped(file, "parquet", weights, sizes, part_bytes))


def _without_text(file: Input, file_format: str, setting: str, names: Names, problem: str) -> Cut:
    """The part of a table without a column; it gives a failure for each row."""
    part = make_part(file, file_format, 0, END if file_format == "parquet" else file.num_bytes, file.num_bytes, 0)
    remedy = "; name another one, or several to join" if setting == TEXT_SETTING else ""
    return Cut([part], f"{setting} = {shown_names(names)}: {file.path}: {problem}{remedy}")


def cut_arrow(file: Input, opened: BinaryIO, names: Names, part_bytes: int) -> Cut:
    """Parts of consecutive record batches of an Arrow file, about the same number in each."""
    try:
        reader = pa.ipc.open_file(opened)
        problem = column_problem(reader.schema, names)
        count = reader.num_record_batches
    except TABLE_ERRORS:
        return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])
    if problem:
        return _without_text(file, "stream", TEXT_SETTING, names, problem)
    sizes = [file.num_bytes // max(1, count)] * count
    return Cut(_grouped(file, "arrow", sizes, sizes, part_bytes))


def cut_delimited(file: Input, head: bytes, file_format: str, names: Names) -> Cut:
    """The part of a CSV or TSV file that begins with these bytes: the whole file."""
    if problem := header_problem(head, names, DELIMITERS[file_format]):
        return _without_text(file, "stream", TEXT_SETTING, names, problem)
    return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])


def _grouped(file: Input, file_format: str, weights: list[int], sizes: list[int], part_bytes: int) -> list[Part]:
    """Parts of consecutive pieces (row groups, record batches), each except the last of at least `part_bytes`."""
    cuts = [0]
    group_weight = 0
    for number, weight in enumerate(weights, 1):
        group_weight += weight
        if group_weight >= part_bytes or number == len(weights):
            cuts.append(number)
            group_weight = 0
    total = max(1, sum(sizes))
    return [
        make_part(
            file, file_format, start, stop, file.num_bytes * sum(sizes[start:stop]) // total, sum(weights[start:stop])
        )
        for start, stop in pairwise(cuts)
    ]


def make_part(file: Input, file_format: str, start: int, stop: int, num_bytes: int, weight: int) -> Part:
    """A part of a file; arguments as in `Part`."""
    values = {"format": file_format, "path": file.path, "source": file.source, "start": start, "stop": stop}
    return Part.model_validate(values | {"num_bytes": num_bytes, "weight": weight})
