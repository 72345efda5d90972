"""Readers of files: generators of documents and failures. Nothing in the data stops them; what fails is a record."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus import Document, Failure, Part

Record = Document | Failure
_READ_ERRORS = (OSError, EOFError, zlib.error)
_ROWS = 256


def read_text(part: Part) -> Iterator[Record]:
    """One document a line."""
    for record in _lines(part):
        yield record if isinstance(record, Failure) else _checked(*record, part.source)


def read_jsonl(part: Part, text_field: str) -> Iterator[Record]:
    """One JSON object a line, the text under `text_field`."""
    for record in _lines(part):
        if isinstance(record, Failure):
            yield record
        else:
            yield _from_json(*record, part.source, text_field)


def read_parquet(part: Part, text_field: str) -> Iterator[Record]:
    """The rows of row groups [start, stop), a few at a time."""
    row = 0
    try:
        with pq.ParquetFile(part.path) as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
            groups = list(range(part.start, part.stop))
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[text_field]):
                for value in batch.column(0).cast(pa.binary()).to_pylist():
                    if value is None:
                        yield Failure(reason="no_text_field", source=part.source, offset=row, message="null text")
                    else:
                        yield _checked(value, row, part.source)
                    row += 1
    except (*_READ_ERRORS, pa.ArrowException) as error:
        yield Failure(reason="unreadable", source=part.source, offset=row, message=str(error))


def _lines(part: Part) -> Iterator[tuple[bytes, int] | Failure]:
    """Lines whose first byte lies in [start, stop), with its position; a file that breaks off is one failure."""
    position = part.start
    compressed = part.path.endswith(".gz")
    try:
        with _open(part.path, compressed) as stream:
            if part.start > 0:
                # The line that straddles the cut belongs to the range before: step back one byte and finish it.
                stream.seek(part.start - 1)
                position = part.start - 1 + len(stream.readline())
            while (compressed or position < part.stop) and (line := stream.readline()):
                yield line, position
                position += len(line)
    except _READ_ERRORS as error:
        message = f"{error} (the rest of the file is lost)"
        yield Failure(reason="unreadable", source=part.source, offset=position, message=message)


def _open(path: str, compressed: bool) -> BinaryIO | gzip.GzipFile:
    """A buffered binary stream of the uncompressed file."""
    return gzip.open(path, "rb") if compressed else open(path, "rb", buffering=1 << 20)  # noqa: PTH123


def _from_json(line: bytes, offset: int, source: str, text_field: str) -> Record:
    """The document of one JSON line. A blank line is an empty document, so that totals close."""
    record = _checked(line, offset, source)
    if isinstance(record, Failure) or not record.text.strip():
        return record
    try:
        value = json.loads(record.text)
    except (ValueError, RecursionError) as error:
        return Failure(reason="invalid_json", source=source, offset=offset, message=str(error))
    if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        message = f"no text under {text_field!r}; found {found}"[:200]
        return Failure(reason="no_text_field", source=source, offset=offset, message=message)
    text: str = value[text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escaped lone surrogate is JSON, but no Unicode text
        return Failure(reason="invalid_utf8", source=source, offset=offset, message=str(error.reason))
    return Document(text, source, offset)


def _checked(raw: bytes, offset: int, source: str) -> Record:
    """A document of these bytes, unless they are not UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"byte {error.start} of the document: {error.reason}"
        return Failure(reason="invalid_utf8", source=source, offset=offset, message=message)
    return Document(text.removeprefix("\ufeff") if offset == 0 else text, source, offset)
