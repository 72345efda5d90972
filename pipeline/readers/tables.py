"""Readers of a text column of Parquet and Arrow, a few rows at a time. The offset of a document is its row."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.pipeline.readers.corpus import MIB, NO_TEXT, Names, ReadFailure, Record, joined, missing
from declutr.pipeline.readers.plain_text import documents, unreadable
from declutr.pipeline.readers.streams import READ_ERRORS

TABLE_ERRORS = (*READ_ERRORS, UnicodeDecodeError)
"""UnicodeDecodeError occurs if the name of a column is damaged."""

_DICTIONARY_ROWS = 32
"""Rows of a batch of a dictionary column; each batch holds the whole dictionary."""
_BUFFER_BYTES = 8 * MIB
"""Read buffer of a Parquet column; without it pyarrow reads the whole column of a row group."""
MAX_LOST_ROWS = 1_000_000
"""Most failures for unreadable rows of one table, because a damaged number of rows can have any value."""


class Rows:
    """Progress of a reader of rows, from which the consumed input is computed."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0

    @property
    def share(self) -> float:
        """Share of the rows that were read, in [0, 1]."""
        return self.done / self.total if self.total else 0.0


def read_parquet(
    file: str | BinaryIO | pa.NativeFile, source: str, names: Names, max_bytes: int, groups: range | None, rows: Rows
) -> Iterator[Record]:
    """Reads these row groups, or all. If a group cannot be read to its end, each remaining row gives a failure.

    Texts are decoded one by one, because sizes in the file are not trusted: memory holds a page and a text, or a
    dictionary and a few texts.
    """
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as table:
            metadata = table.metadata
            # Damaged numbers of rows can be negative.
            sizes = [max(0, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
            groups = range(len(sizes)) if groups is None else groups
            if groups.stop > len(sizes):
                raise EOFError(f"the file has {len(sizes)} row groups, not {groups.stop}: it was changed")
            first = sum(sizes[: groups.start])
            rows.total = sum(sizes[groups.start : groups.stop])
            if problem := column_problem(table.schema_arrow, names):
                yield from lost_rows(NO_TEXT, source, first, rows.total, problem)
                return
            is_dictionary = any(pa.types.is_dictionary(table.schema_arrow.field(name).type) for name in names)
            for group in groups:
                row, end = first, first + sizes[group]
                try:
                    for batch in table.iter_batches(
                        _DICTIONARY_ROWS if is_dictionary else 1, [group], list(names), use_threads=False
                    ):
                        yield from text_records(_columns(batch, names), source, row, max_bytes)
                        row += batch.num_rows
                        rows.done += batch.num_rows
                    if row < end:
                        raise EOFError(f"it holds {row - first} of {end - first} rows")
                except TABLE_ERRORS as error:
                    message = f"{error} (the rest of row group {group} of {source} is lost)"
                    yield from lost_rows("unreadable", source, row, end - row, message)
                first = end
    except TABLE_ERRORS as error:
        yield unreadable(error, source, 0)


def read_arrow_batches(
    file: Any, source: str, names: Names, max_bytes: int, batches: range, rows: Rows
) -> Iterator[Record]:
    """The rows of record batches of a seekable Arrow file."""
    row = 0
    rows.total = len(batches)
    try:
        reader = pa.ipc.open_file(file)
        if batches.stop > reader.num_record_batches:
            raise EOFError(
                f"the file has {reader.num_record_batches} record batches, not {batches.stop}: it was changed"
            )
        row = sum(reader.get_batch(number).num_rows for number in range(batches.start))
        for number in batches:
            batch = reader.get_batch(number)
            yield from _batch_records(batch, source, names, row, max_bytes)
            row += batch.num_rows
            rows.done += 1
    except TABLE_ERRORS as error:
        yield unreadable(error, source, row)


def read_arrow_stream(file: Any, source: str, names: Names, max_bytes: int) -> Iterator[Record]:
    """The rows of an Arrow stream, read forward. An Arrow file holds a stream between its magic and its footer."""
    row = 0
    try:
        with pa.ipc.open_stream(file) as reader:
            for batch in reader:
                yield from _batch_records(batch, source, names, row, max_bytes)
                row += batch.num_rows
            if row == 0 and (problem := column_problem(reader.schema, names)):
                yield from lost_rows(NO_TEXT, source, 0, 1, problem)
    except TABLE_ERRORS as error:
        yield unreadable(error, source, row)


def _batch_records(
    batch: pa.RecordBatch, source: str, names: Names, first_row: int, max_bytes: int
) -> Iterator[Record]:
    """The documents of a record batch; failures if it has no text column."""
    if problem := column_problem(batch.schema, names):
        if batch.num_rows:
            yield from lost_rows(NO_TEXT, source, first_row, batch.num_rows, problem)
    else:
        yield from text_records(_columns(batch, names), source, first_row, max_bytes)


def lost_rows(reason: str, source: str, first_row: int, count: int, message: str) -> Iterator[ReadFailure]:
    """A failure for each of these rows: at least one, at most `MAX_LOST_ROWS`; the last one counts the others."""
    count = max(1, count)
    last = first_row + min(count, MAX_LOST_ROWS) - 1
    for row in range(first_row, last + 1):
        more = f"; {count - MAX_LOST_ROWS} more rows are lost, too" if row == last and count > MAX_LOST_ROWS else ""
        yield ReadFailure(reason=reason, source=source, offset=row, message=message + more)


def _columns(batch: pa.RecordBatch, names: Names) -> list[pa.Array]:
    return [batch.column(name) for name in names]


def text_records(columns: list[pa.Array], source: str, first_row: int, max_bytes: int) -> Iterator[Record]:
    """The documents of columns, with the row as offset; a row of nulls gives a failure.

    Raises:
        pa.ArrowException: a column's offsets or indices point outside its data.
    """
    for row, values in enumerate(zip(*map(_values, columns), strict=True), first_row):
        texts = [value.as_buffer() for value in values if value is not None and value.is_valid]
        if texts:
            text = texts[0] if len(columns) == 1 else joined(map(bytes, texts))
            yield from documents(text, source, row, max_bytes)
        else:
            yield ReadFailure(reason=NO_TEXT, source=source, offset=row, message="the text is null")


def _values(column: pa.Array) -> Iterator[pa.Scalar | None]:
    """The values of a column as bytes.

    Raises:
        pa.ArrowException: the column's offsets or indices point outside its data.
    """
    if pa.types.is_dictionary(column.type):
        # Never decoded as a whole, because a few large texts of a dictionary may stand for any number of rows.
        texts = as_bytes(column.dictionary)
        pa.DictionaryArray.from_arrays(column.indices, texts, safe=False).validate(full=True)
        places = column.indices.to_pylist()
        return (None if place is None else texts[place] for place in places)
    return iter(as_bytes(column))


def as_bytes(column: pa.Array) -> pa.Array:
    """Texts as bytes, so that one text that is not UTF-8 does not affect the others.

    Raises:
        pa.ArrowException: the offsets point outside the data.
    """
    column = column.view(_BYTES[column.type]) if column.type in _BYTES else column
    column.validate(full=True)
    return column


_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_TEXTS = (*_BYTES, *_BYTES.values())


def column_problem(schema: pa.Schema, names: Names) -> str | None:
    """The problem of a table as a source of texts; None if it has the text columns."""
    if problem := missing(names, schema.names):
        return problem
    for name in names:
        if schema.names.count(name) > 1:
            return f"{schema.names.count(name)} columns {name!r}"
        kind = schema.field(name).type
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in _TEXTS:
            return f"column {name!r} is of type {kind}, not text"
    return None
