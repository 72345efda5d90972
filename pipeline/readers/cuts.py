"""Cuts of one file into parts: byte ranges, members of an archive, row groups, record batches."""

from collections.abc import Callable
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.pipeline.readers.archives import find_members
from declutr.pipeline.readers.blobs import blob_column_problem
from declutr.pipeline.readers.corpus import END, TEXT_SETTING, Input, Names, Part, shown_names
from declutr.pipeline.readers.delimited import DELIMITERS, header_problem
from declutr.pipeline.readers.streams import ByteStream
from declutr.pipeline.readers.tables import TABLE_ERRORS, column_problem


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
    least = max(part_bytes, -(-size // max_parts)) if max_parts > 1 else part_bytes
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= least:
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


def cut_ranges(file: Input, known: str, part_bytes: int) -> list[Part]:
    """Byte ranges of a plain file. A line belongs to the range of its first byte."""
    count = max(1, -(-file.num_bytes // part_bytes))
    cuts = [file.num_bytes * i // count for i in range(count + 1)]
    return [make_part(file, known, start, stop, stop - start, stop - start) for start, stop in pairwise(cuts)]


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


def _without_text(file: Input, known: str, setting: str, names: Names, problem: str) -> Cut:
    """The part of a table without a column; it gives a failure for each row."""
    part = make_part(file, known, 0, END if known == "parquet" else file.num_bytes, file.num_bytes, 0)
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


def cut_delimited(file: Input, head: bytes, known: str, names: Names) -> Cut:
    """The part of a CSV or TSV file that begins with these bytes: the whole file."""
    if problem := header_problem(head, names, DELIMITERS[known]):
        return _without_text(file, "stream", TEXT_SETTING, names, problem)
    return Cut([make_part(file, "stream", 0, file.num_bytes, file.num_bytes, file.num_bytes)])


def _grouped(file: Input, known: str, weights: list[int], sizes: list[int], part_bytes: int) -> list[Part]:
    """Parts of consecutive pieces (row groups, record batches), each except the last of at least `part_bytes`."""
    cuts = [0]
    held = 0
    for number, weight in enumerate(weights, 1):
        held += weight
        if held >= part_bytes or number == len(weights):
            cuts.append(number)
            held = 0
    total = max(1, sum(sizes))
    return [
        make_part(file, known, start, stop, file.num_bytes * sum(sizes[start:stop]) // total, sum(weights[start:stop]))
        for start, stop in pairwise(cuts)
    ]


def make_part(file: Input, known: str, start: int, stop: int, num_bytes: int, weight: int) -> Part:
    """A part of a file; arguments as in `Part`."""
    values = {"format": known, "path": file.path, "source": file.source, "start": start, "stop": stop}
    return Part.model_validate(values | {"num_bytes": num_bytes, "weight": weight})
