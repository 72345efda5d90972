"""Rows of Parquet, Arrow, CSV and TSV, a few at a time. The offset of a record is its row."""

import csv
import re
import sys
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.pipeline.readers.corpus import END, MIB, ReadFailure, Records, Rules, failed, unreadable
from declutr.pipeline.readers.lines import MAX_HELD_BYTES, as_utf8, encoding_of, lines
from declutr.pipeline.readers.rows import BlobRows, Rows, rows_of
from declutr.pipeline.readers.streams import READ_ERRORS, Body, ByteStream, bounded_content

TABLE_ERRORS = (*READ_ERRORS, UnicodeDecodeError)  # UnicodeDecodeError occurs if the name of a column is damaged
DELIMITERS = {"csv": ",", "tsv": "\t"}
# Largest field; it is in memory with four bytes a character. A longer one is usually an unclosed quote.
MAX_FIELD_BYTES = 64 * MIB
MAX_ROW_BYTES = 4 * MAX_FIELD_BYTES  # memory of the lines of a row, each of which takes 50 bytes more than its text
ARROW_FILE = b"ARROW1\0\0"
_BUFFER_BYTES = 8 * MIB  # read buffer of a Parquet column; without it pyarrow reads the whole column of a row group
# Most failures for unreadable rows of one table, because a damaged number of rows can have any value.
MAX_LOST_ROWS = 1_000_000
_HEAD_BYTES = 1 << 16
_SEPARATOR = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=([,;|\t])"?(?:\r\n?|\n)', re.IGNORECASE)
"""A first line by which Excel names the delimiter."""
_TOO_LARGE = "\ud800\n"  # no bytes of a file are decoded to it
_ESCAPED = '\\"'
_BACKSLASH = '; \\" is no quotation mark of CSV, which doubles it: ""'


def read_parquet(body: Body, file: BinaryIO | pa.NativeFile, groups: range | None = None) -> Records:
    """Reads these row groups, or all. If a group cannot be read to its end, each remaining row gives a failure.

    Values are decoded a few at a time, because sizes in the file are not trusted.
    """
    rows, source, done = rows_of(body.rules), body.source, 0
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as table:
            metadata, schema = table.metadata, table.schema_arrow
            # Damaged numbers of rows can be negative.
            sizes = [max(0, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
            groups = range(len(sizes)) if groups is None else groups
            if groups.stop > len(sizes):
                raise EOFError(f"the file has {len(sizes)} row groups, not {groups.stop}: it was changed")
            first = sum(sizes[: groups.start])
            total = sum(sizes[groups.start : groups.stop])
            if problem := rows.problem(schema):
                problem = (
                    f"{rows.setting} = {rows.setting_value!r}: {problem}" if isinstance(rows, BlobRows) else problem
                )
                yield from lost_rows(rows.no_column, source, first, total, problem)
                return
            batch_rows = rows.batch_rows(schema)
            for group in groups:
                row, end = first, first + sizes[group]
                try:
                    for batch in table.iter_batches(batch_rows, [group], list(rows.names), use_threads=False):
                        done += batch.num_rows
                        body.share = done / total if total else 0.0  # before its rows: their bytes are read already
                        yield from rows.of_batch(batch, source, row)
                        row += batch.num_rows
                    if row < end:
                        raise EOFError(f"it holds {row - first} of {end - first} rows")
                except TABLE_ERRORS as error:
                    message = f"{error} (the rest of row group {group} of {source} is lost)"
                    yield from lost_rows("unreadable", source, row, end - row, message)
                first = end
    except TABLE_ERRORS as error:
        yield unreadable(error, source, 0)


def read_forward_parquet(body: Body) -> Records:
    """A Parquet file that can only be read forward; it is held in memory, because its directory is at its end."""
    excess = f"a Parquet file of more than {MAX_HELD_BYTES >> 20} MiB inside an archive or compression"
    data = bounded_content(body, MAX_HELD_BYTES, excess)
    if isinstance(data, ReadFailure):
        yield data
    else:
        yield from read_parquet(body, pa.BufferReader(pa.py_buffer(data)))


def read_arrow_batches(body: Body, file: Any, batches: range) -> Records:
    """The rows of record batches of a seekable Arrow file."""
    rows, row = rows_of(body.rules), 0
    try:
        reader = pa.ipc.open_file(file)
        if batches.stop > reader.num_record_batches:
            raise EOFError(
                f"the file has {reader.num_record_batches} record batches, not {batches.stop}: it was changed"
            )
        if batches.start > 0:  # counted by one column of numbers: others may need decompression
            narrow = [number for number, kind in enumerate(reader.schema.types) if pa.types.is_primitive(kind)][:1]
            counter = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=narrow))
            row = sum(counter.get_batch(number).num_rows for number in range(batches.start))
        for done, number in enumerate(batches, 1):
            batch = reader.get_batch(number)
            for record in _of_batch(rows, batch, body.source, row):
                body.share = done / len(batches)  # with its first record, as the batch may be damaged
                yield record
            row += batch.num_rows
    except TABLE_ERRORS as error:
        yield unreadable(error, body.source, row)


def read_arrow_stream(body: Body) -> Records:
    """The rows of an Arrow stream, read forward. An Arrow file holds a stream between its magic and its footer."""
    rows, row = rows_of(body.rules), 0
    try:
        if body.stream.peek(len(ARROW_FILE)) == ARROW_FILE:
            body.stream.skip(len(ARROW_FILE))
        with pa.ipc.open_stream(pa.PythonFile(body.stream, mode="r")) as reader:
            for batch in reader:
                yield from _of_batch(rows, batch, body.source, row)
                row += batch.num_rows
            if row == 0 and (problem := rows.problem(reader.schema)):  # no batch has reported it
                yield from lost_rows(rows.no_column, body.source, 0, 1, problem)
    except TABLE_ERRORS as error:
        yield unreadable(error, body.source, row)


def _of_batch(rows: Rows, batch: pa.RecordBatch, source: str, first_row: int) -> Records:
    """The records of a record batch; failures if it has no text column."""
    if not (problem := rows.problem(batch.schema)):
        yield from rows.of_batch(batch, source, first_row)
    elif batch.num_rows:
        yield from lost_rows(rows.no_column, source, first_row, batch.num_rows, problem)


def lost_rows(reason: str, source: str, first_row: int, count: int, message: str) -> Iterator[ReadFailure]:
    """A failure for each of these rows: at least one, at most `MAX_LOST_ROWS`; the last one counts the others."""
    count = max(1, count)
    last = first_row + min(count, MAX_LOST_ROWS) - 1
    for row in range(first_row, last + 1):
        more = f"; {count - MAX_LOST_ROWS} more rows are lost, too" if row == last and count > MAX_LOST_ROWS else ""
        yield failed(reason, source, row, message + more)


class _Feed(Iterator[str]):
    """Lines of text for the csv module, which requests further lines while a quoted field is open.

    Bytes that are not UTF-8 become surrogates, so that they affect only their row.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._lines = self._decoded(stream)
        self._again: deque[str] = deque()
        self._num_lines = self._num_again = self.row_bytes = 0  # bytes: memory of `row_lines`
        self.row_lines: list[str] = []  # of the row that is being read; `_TOO_LARGE` for one that is too long

    def __next__(self) -> str:
        if self.row_bytes > MAX_ROW_BYTES:
            raise csv.Error(f"a row takes more than {MAX_ROW_BYTES // MIB} MiB of memory; close its quotation mark")
        line = self._again.popleft() if self._again else next(self._lines)
        self.row_lines.append(line)
        self.row_bytes += sys.getsizeof(line)
        return line

    def _decoded(self, stream: ByteStream) -> Iterator[str]:
        too_large = False
        for raw, offset, continues in lines(stream, END, MAX_FIELD_BYTES, keep=False):
            too_large |= continues
            if not continues:
                self._num_lines += 1
                data = raw.removeprefix(b"\xef\xbb\xbf") if offset == 0 else raw
                yield _TOO_LARGE if too_large else data.decode("utf-8", "surrogateescape") + "\n"  # csv takes text
                too_large = False

    def reread(self) -> int:
        """Puts back the lines after the first of this row and returns 0, or returns their number if they are lost."""
        num_again = len(self.row_lines) - 1
        # Usually a line is read again once; if each line opened a quoted field, it would be once for every line before.
        if self._num_again + num_again > 16 * self._num_lines:
            return num_again
        self._num_again += num_again
        self._again.extendleft(reversed(self.row_lines[1:]))  # extendleft reverses their order
        return 0


def read_delimited(body: Body, delimiter: str) -> Records:
    """The values in the columns of every row. Quoted fields may hold delimiters and newlines."""
    rows, source = rows_of(body.rules), body.source
    assert not isinstance(rows, BlobRows)
    header: list[str] | None = None
    problem: str | None = None
    columns: list[int] = []
    num_rows = 0
    for row, fields in _delimited_rows(body.stream, source, delimiter):
        num_rows += row >= 0
        if isinstance(fields, ReadFailure):
            yield fields
        elif header is None:
            header, problem = fields, rows.header_problem(fields)
            columns = [] if problem else [fields.index(name) for name in rows.names]
        elif problem:
            yield failed(rows.no_column, source, row, problem)
        elif fields and rows.is_cut(fields, header, columns):
            yield failed("invalid_csv", source, row, f"the row has {len(fields)} of {len(header)} columns")
        else:
            # Back to bytes, with the error handler by which the feed has decoded.
            values = [fields[column].encode("utf-8", "surrogateescape") for column in columns if fields]
            yield from rows.of_row(values, source, row)
    if problem and not num_rows:  # most likely not a CSV file at all
        yield failed(rows.no_column, source, 0, problem)


def header_problem(head: bytes, rules: Rules, delimiter: str) -> str | None:
    """The problem of a file that begins with these bytes, if its header lacks a column and ends within them."""
    stream = ByteStream(BytesIO(head).read)
    encoding, rows = encoding_of(head), rows_of(rules)
    assert not isinstance(rows, BlobRows)
    table = _delimited_rows(as_utf8(stream, encoding) if encoding else stream, "", delimiter)
    first = [fields for _, fields in islice(table, 2)]
    return rows.header_problem(first[0]) if len(first) == 2 and not isinstance(first[0], ReadFailure) else None


def _delimited_rows(stream: ByteStream, source: str, delimiter: str) -> Iterator[tuple[int, list[str] | ReadFailure]]:
    """The fields of every row, with its number; the first row without a failure is the header, number -1.

    A quotation mark that opens a field and is closed rows later would swallow these rows. So quoting is strict, a row
    of several lines has as many fields as the header, and what breaks this loses its first line alone: the lines behind
    it are read again. A line of TSV, which has no quoting, keeps its marks then if it has the fields of the header.
    """
    csv.field_size_limit(MAX_FIELD_BYTES)  # a limit of the whole process, in which no other code reads CSV
    head = stream.head(_HEAD_BYTES)
    if match := _SEPARATOR.match(head):
        delimiter = match[1].decode()
        stream.skip(match.end())
    if b"\r" in head[:-1] and b"\n" not in head:  # CR alone ends the rows, as in files of old spreadsheets
        source_stream = stream
        stream = ByteStream(lambda size: source_stream.read(size).replace(b"\r", b"\n"), stream.position)
    feed = _Feed(stream)
    rows = csv.reader(feed, delimiter=delimiter, strict=True)
    num_columns = row = 0
    while True:
        feed.row_lines, feed.row_bytes, fields, problem = [], 0, list[str](), ""
        try:
            fields = next(rows)
        except StopIteration:
            return
        except READ_ERRORS as error:
            yield row, unreadable(error, source, row)
            return
        except csv.Error as error:
            problem = f"{error}{_BACKSLASH if _ESCAPED in feed.row_lines[0] else ''}"
        if num_columns == 0 and not problem and feed.row_lines != [_TOO_LARGE]:
            num_columns = len(fields)
            if fields:  # a blank line is not the header
                yield -1, fields
            continue
        num_lines = len(feed.row_lines)
        if num_lines > 1 and not problem:
            # Lines of TSV that each have the fields of the header are rows, and their quotation marks are text.
            are_whole = all(line.count(delimiter) == num_columns - 1 for line in feed.row_lines)
            are_rows = delimiter == "\t" and num_columns > 1 and are_whole
            if len(fields) != num_columns or are_rows or _TOO_LARGE in feed.row_lines:
                problem = f"a quotation mark is closed {num_lines - 1} lines later"
        if feed.row_lines == [_TOO_LARGE]:
            yield row, failed("too_large", source, row, f"a line of more than {MAX_FIELD_BYTES // MIB} MiB")
        elif not problem:
            yield row, fields
        else:
            # The csv module says "field larger than field limit".
            reason = "too_large" if "limit" in problem and num_lines == 1 else "invalid_csv"
            for place, line in enumerate(feed.row_lines[: 1 + feed.reread()], row):
                row = place
                if delimiter == "\t" and line != _TOO_LARGE and line.count(delimiter) == num_columns - 1:
                    yield row, line.rstrip("\r\n").split(delimiter)
                else:
                    yield row, failed(reason, source, row, problem)
        row += 1
