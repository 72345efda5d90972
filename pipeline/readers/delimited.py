"""CSV and TSV with a header: quoted fields may hold delimiters and newlines. The offset of a document is its row."""

import csv
from collections.abc import Iterator

from pipeline.readers.corpus import END, MIB, ReadFailure, Record
from pipeline.readers.lines import lines, unreadable
from pipeline.readers.pieces import documents
from pipeline.readers.streams import READ_ERRORS, ByteStream

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


def read_delimited(
    stream: ByteStream, source: str, text_field: str, max_bytes: int, delimiter: str
) -> Iterator[Record]:
    """The column `text_field` of every row."""
    csv.field_size_limit(MAX_FIELD_BYTES)  # a limit of the whole process, in which no other code reads CSV
    feed = _Feed(stream)
    rows = csv.reader(feed, delimiter=delimiter)
    column: int | None = None
    header: list[str] | None = None
    row = 0
    while True:
        feed.too_large = False
        try:
            fields = next(rows)
        except StopIteration:
            if header is not None and column is None and row == 0:  # most likely not a CSV file at all
                yield _no_column(header, text_field, source, row)
            return
        except READ_ERRORS as error:
            yield unreadable(error, source, row)
            return
        except csv.Error as error:
            reason = "too_large" if "limit" in str(error) else "invalid_csv"
            yield ReadFailure(reason=reason, source=source, offset=row, message=str(error))
            row += 1
            continue
        if header is None:
            header = fields
            column = header.index(text_field) if text_field in header else None
            continue
        if feed.ended:
            yield ReadFailure(reason="invalid_csv", source=source, offset=row, message="a quoted field is never closed")
        elif feed.too_large:
            message = f"a line of more than {MAX_FIELD_BYTES // MIB} MiB"
            yield ReadFailure(reason="too_large", source=source, offset=row, message=message)
        elif column is None:
            yield _no_column(header or [], text_field, source, row)
        elif not fields:  # a blank line is an empty document, so that totals close
            yield from documents(b"", source, row, max_bytes)
        elif len(fields) <= column:
            message = f"the row has {len(fields)} of {len(header)} columns"
            yield ReadFailure(reason="invalid_csv", source=source, offset=row, message=message)
        else:
            yield from documents(fields[column].encode("utf-8", "surrogateescape"), source, row, max_bytes)
        row += 1


def _no_column(header: list[str], text_field: str, source: str, row: int) -> ReadFailure:
    message = f"no column {text_field!r}; found {header}"[:200]
    return ReadFailure(reason="no_text_field", source=source, offset=row, message=message)
