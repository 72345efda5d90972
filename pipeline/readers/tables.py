"""Parquet and Arrow: a column of texts, a few rows at a time. The offset of a document is its row."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus import MIB, Failure, Record
from pipeline.readers.lines import unreadable
from pipeline.readers.pieces import documents
from pipeline.readers.streams import READ_ERRORS

TABLE_ERRORS = (*READ_ERRORS, UnicodeDecodeError)
"""The last where the name of a column is damaged."""

_BATCH_BYTES = 16 * MIB
_MAX_ROWS = 1024


def is_text(column: pa.DataType) -> bool:
    """Whether a column can hold texts."""
    kind = column.value_type if pa.types.is_dictionary(column) else column
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    views = (pa.types.is_string_view, pa.types.is_binary_view)
    return any(test(kind) for test in (*tests, *views))


class Rows:
    """How far a reader of rows is: from it follows how much of the input it has consumed."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0

    @property
    def share(self) -> float:
        """In [0, 1]."""
        return self.done / self.total if self.total else 0.0


def read_parquet(
    file: str | BinaryIO | pa.NativeFile, source: str, text_field: str, max_bytes: int, groups: range | None, rows: Rows
) -> Iterator[Record]:
    """The rows of some row groups, or of all. One that cannot be read is a failure, and the next one is read."""
    try:
        with pq.ParquetFile(file) as table:
            metadata = table.metadata
            if problem := column_problem(table.schema_arrow, text_field):
                yield Failure(reason="no_text_field", source=source, offset=0, message=problem)
                return
            groups = range(metadata.num_row_groups) if groups is None else groups
            # Damaged numbers of rows can be negative.
            sizes = [max(0, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
            first = sum(sizes[: groups.start])
            rows.total = sum(sizes[groups.start : groups.stop])
            for group in groups:
                mean = max(1, metadata.row_group(group).total_byte_size // max(1, sizes[group]))
                batch_rows = int(min(_MAX_ROWS, max(1, _BATCH_BYTES // mean)))
                row = first
                try:
                    for batch in table.iter_batches(batch_rows, [group], [text_field], use_threads=False):
                        yield from column_records(batch.column(0), source, row, max_bytes)
                        row += batch.num_rows
                        rows.done += batch.num_rows
                except TABLE_ERRORS as error:
                    message = f"{error} (the rest of row group {group} of {source} is lost)"
                    yield Failure(reason="unreadable", source=source, offset=row, message=message)
                first += sizes[group]
    except TABLE_ERRORS as error:
        yield unreadable(error, source, 0)


def read_arrow_batches(
    file: Any, source: str, text_field: str, max_bytes: int, batches: range, rows: Rows
) -> Iterator[Record]:
    """The rows of record batches of an Arrow file that can be read anywhere."""
    row = 0
    rows.total = len(batches)
    try:
        reader = pa.ipc.open_file(file)
        if problem := column_problem(reader.schema, text_field):
            yield Failure(reason="no_text_field", source=source, offset=0, message=problem)
            return
        row = sum(reader.get_batch(number).num_rows for number in range(batches.start))
        for number in batches:
            batch = reader.get_batch(number)
            yield from column_records(batch.column(text_field), source, row, max_bytes)
            row += batch.num_rows
            rows.done += 1
    except TABLE_ERRORS as error:
        yield unreadable(error, source, row)


def read_arrow_stream(file: Any, source: str, text_field: str, max_bytes: int) -> Iterator[Record]:
    """The rows of an Arrow stream, read forward. An Arrow file is one too, between its magic and its footer."""
    row = 0
    try:
        with pa.ipc.open_stream(file) as reader:
            if problem := column_problem(reader.schema, text_field):
                yield Failure(reason="no_text_field", source=source, offset=0, message=problem)
                return
            for batch in reader:
                yield from column_records(batch.column(text_field), source, row, max_bytes)
                row += batch.num_rows
    except TABLE_ERRORS as error:
        yield unreadable(error, source, row)


def column_records(column: pa.Array, source: str, first_row: int, max_bytes: int) -> Iterator[Record]:
    """The documents of a column, with the number of the row; null is a failure.

    Raises:
        pa.ArrowException: the column's offsets point outside its data.
    """
    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    # As bytes, because one text that is not UTF-8 must not spoil the others. Checked in full, because offsets in a
    # damaged file would otherwise be followed wherever they point.
    column = column.view(_BYTES[column.type]) if column.type in _BYTES else column
    column.validate(full=True)
    for row, value in enumerate(column, first_row):
        if value.is_valid:
            yield from documents(value.as_buffer(), source, row, max_bytes)
        else:
            yield Failure(reason="no_text_field", source=source, offset=row, message="null text")


_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def column_problem(schema: pa.Schema, text_field: str) -> str | None:
    """What is wrong with a table as a source of texts."""
    if schema.names.count(text_field) != 1:
        return f"no column {text_field!r} (or more than one); found {schema.names}"[:200]
    kind = schema.field(text_field).type
    return None if is_text(kind) else f"column {text_field!r} is of type {kind}, not text"
