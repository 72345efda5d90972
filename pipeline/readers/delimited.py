"""CSV and TSV with a header: quoted fields may hold delimiters and newlines. The offset of a document is its row."""

import csv
from collections.abc import Iterator
from io import BytesIO
from itertools import islice

from declutr.pipeline.readers.corpus import END, MIB, NO_TEXT, Names, ReadFailure, Record, joined, missing
from declutr.pipeline.readers.plain_text import as_utf8, documents, encoding_of, lines, unreadable
from declutr.pipeline.readers.streams import READ_ERRORS, ByteStream

DELIMITERS = {"csv": ",", "tsv": "\t"}
MAX_FIELD_BYTES = 64 * MIB
"""Largest field; it is in memory with four bytes a character. A longer one is usually an unclosed quote."""


class _Feed:
    """Lines of text for the csv module, which requests further lines while a quoted field is open.

    Bytes that are not UTF-8 become surrogates, so that they affect only their row.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._lines = lines(stream, END, MAX_FIELD_BYTES, keep=False)
        self.ended = False
        self.too_large = False

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        for raw, offset, continues in self._lines:
            self.too_large |= continues
            if not continues:
                data = raw.removeprefix(b"\xef\xbb\xbf") if offset == 0 else raw
                return data.decode("utf-8", "surrogateescape") + "\n"
        self.ended = True
        raise StopIteration


def read_delimited(stream: ByteStream, source: str, names: Names, max_bytes: int, delimiter: str) -> Iterator[Record]:
    """The text in the columns `names` of every row."""
    columns: list[int] | None = None
    header: list[str] | None = None
    num_rows = 0
    for row, fields in delimited_rows(stream, source, delimiter):
        num_rows += row >= 0
        if isinstance(fields, ReadFailure):
            yield fields
        elif header is None:
            header = fields
            columns = None if missing(names, header) else [header.index(name) for name in names]
        elif columns is None:
            yield _no_column(header, names, source, row)
        elif not fields:  # a blank line is an empty document, so that totals close
            yield from documents(b"", source, row, max_bytes)
        elif len(fields) <= max(columns) or any(field.strip() for field in fields[len(header) :]):  # a text may be cut
            yield short_row(fields, header, source, row)
        else:
            text = joined(fields[column].encode("utf-8", "surrogateescape") for column in columns)
            yield from documents(text, source, row, max_bytes)
    if header is not None and columns is None and not num_rows:  # most likely not a CSV file at all
        yield _no_column(header, names, source, 0)


def header_problem(head: bytes, names: Names, delimiter: str) -> str | None:
    """The problem of a file that begins with these bytes, if its header lacks a column and ends within them."""
    stream = ByteStream(BytesIO(head).read)
    encoding = encoding_of(head)
    rows = delimited_rows(as_utf8(stream, encoding) if encoding else stream, "", delimiter)
    first = [fields for _, fields in islice(rows, 2)]
    return missing(names, first[0]) if len(first) == 2 and not isinstance(first[0], ReadFailure) else None


def delimited_rows(stream: ByteStream, source: str, delimiter: str) -> Iterator[tuple[int, list[str] | ReadFailure]]:
    """The fields of every row, with its number; the first row without a failure is the header, number -1."""
    csv.field_size_limit(MAX_FIELD_BYTES)  # a limit of the whole process, in which no other code reads CSV
    feed = _Feed(stream)
    rows = csv.reader(feed, delimiter=delimiter)
    seen_header = False
    row = 0
    while True:
        feed.too_large = False
        try:
            fields = next(rows)
        except StopIteration:
            return
        except READ_ERRORS as error:
            yield row, unreadable(error, source, row)
            return
        except csv.Error as error:
            reason = "too_large" if "limit" in str(error) else "invalid_csv"
            yield row, ReadFailure(reason=reason, source=source, offset=row, message=str(error))
            row += 1
            continue
        if not seen_header:
            seen_header = True
            yield -1, fields
            continue
        if feed.ended:
            message = "a quoted field is never closed"
            yield row, ReadFailure(reason="invalid_csv", source=source, offset=row, message=message)
        elif feed.too_large:
            message = f"a line of more than {MAX_FIELD_BYTES // MIB} MiB"
            yield row, ReadFailure(reason="too_large", source=source, offset=row, message=message)
        else:
            yield row, fields
        row += 1


def short_row(fields: list[str], header: list[str], source: str, row: int) -> ReadFailure:
    """The failure of a row without some of the columns, or with more."""
    message = f"the row has {len(fields)} of {len(header)} columns"
    return ReadFailure(reason="invalid_csv", source=source, offset=row, message=message)


def _no_column(header: list[str], names: Names, source: str, row: int) -> ReadFailure:
    return ReadFailure(reason=NO_TEXT, source=source, offset=row, message=missing(names, header) or "")
