"""Readers of files that are one image or clip each, with labels: plain files, members of archives, rows of Parquet.

Images and clips are read as the bytes of their files; pipeline/media decodes them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from declutr.pipeline.readers.corpus import Blob, Document, ReadFailure, Record, Rejected
from declutr.pipeline.readers.names import bare_suffix
from declutr.pipeline.readers.plain_text import unreadable
from declutr.pipeline.readers.streams import READ_ERRORS, ByteStream
from declutr.pipeline.readers.tables import TABLE_ERRORS, Rows, lost_rows

OTHER_FILE = "other_file"
"""Reason of a member of an archive that is neither an image or clip nor a label."""
LABEL_ALONE = "label_alone"
"""Reason of a label without an image or clip next to it."""
NO_COLUMN = "no_column"
_LABEL_SUFFIX = ".cls"
_LABEL_BYTES = 1024
_PARQUET = b"PAR1"
_BUFFER_BYTES = 8 << 20
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())

BlobFormat = Literal["blob", "label", "parquet", "other"]


@dataclass(frozen=True, slots=True)
class BlobRules:
    """Rules for reading a corpus of images or clips."""

    kind: str
    """`images` or `audio`, for messages."""
    suffixes: frozenset[str]
    """Endings of their files."""
    setting: str
    """Setting that names the column."""
    column: str
    """Column of the images or clips in Parquet."""
    label_column: str


@dataclass(frozen=True, slots=True)
class _Label(Document):
    """The label in `text`, of the images or clips with the same name."""


def blob_format(head: bytes, name: str, blobs: BlobRules) -> BlobFormat:
    """The format of uncompressed content that is not an archive."""
    if head.startswith(_PARQUET):
        return "parquet"
    suffix = bare_suffix(name)
    return "blob" if suffix in blobs.suffixes else "label" if suffix == _LABEL_SUFFIX else "other"


def read_blob(stream: ByteStream, source: str, file_format: BlobFormat, max_bytes: int) -> Iterator[Record]:
    """The record of one file: an image or clip, a label, or a file that is neither."""
    if file_format == "other":
        yield Rejected("", source, 0, OTHER_FILE)
        return
    data, limit = bytearray(), _LABEL_BYTES if file_format == "label" else max_bytes
    try:
        while len(data) <= limit and (chunk := stream.read()):
            data += chunk
    except READ_ERRORS as error:
        yield unreadable(error, source, 0)
        return
    if len(data) > limit:
        allowed = (
            f"{limit} bytes" if file_format == "label" else f"corpus.max_document_mib = {max_bytes / (1 << 20):g} MiB"
        )
        yield ReadFailure(reason="too_large", source=source, offset=0, message=f"the file has more than {allowed}")
    elif file_format == "blob":
        yield Blob("", source, 0, bytes(data), None)
    else:
        try:
            yield _Label(data.decode().strip(), source, 0)
        except UnicodeDecodeError as error:
            yield ReadFailure(reason="bad_label", source=source, offset=0, message=f"not UTF-8: {error.reason}")


def member_key(name: str) -> str:
    """The name that an image or clip and its label share: without everything after the first dot of the file's name."""
    start = max(name.rfind("/"), name.rfind("!")) + 1
    return name[:start] + name[start:].partition(".")[0]


def with_labels(records: Iterator[Record], max_bytes: int) -> Iterator[Record]:
    """The records of an archive, where the label of a name goes to the images or clips of that name around it.

    Those of one name are held until the next name, but not more than `max_bytes` bytes of them.
    """
    blobs: list[Blob] = []
    key: str | None = None
    label: _Label | None = None
    used = False
    for record in records:
        name = member_key(record.source)
        if name != key:
            yield from _released(blobs, label, used)
            blobs, key, label, used = [], name, None, False
        if isinstance(record, _Label) and label is None:
            label = record
        elif isinstance(record, _Label):
            yield Rejected("", record.source, 0, LABEL_ALONE)
        elif isinstance(record, Blob) and record.label is None:
            blobs.append(record)
            while len(blobs) > 1 and sum(len(blob.data) for blob in blobs) > max_bytes:
                yield _labelled(blobs.pop(0), label)
                used = True
        else:
            yield record
    yield from _released(blobs, label, used)


def _released(blobs: list[Blob], label: _Label | None, used: bool) -> Iterator[Record]:
    """The held images or clips with their label; the label itself as left out if there are none."""
    if label is not None and not blobs and not used:
        yield Rejected("", label.source, 0, LABEL_ALONE)
    for blob in blobs:
        yield _labelled(blob, label)


def _labelled(blob: Blob, label: _Label | None) -> Blob:
    return replace(blob, label=label.text or None) if label else blob


def blob_column_problem(schema: pa.Schema, column: str) -> str | None:
    """The problem of a table as a source of images or clips; None if it has a column of bytes."""
    if schema.names.count(column) != 1:
        return f"no column {column!r} (or more than one); found {schema.names}"[:200]
    kind = schema.field(column).type
    if pa.types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        kind = kind.field("bytes").type if names.count("bytes") == 1 else kind
    return None if kind in _BYTES else f"column {column!r} is of type {kind}, not bytes or a struct with bytes"


def read_parquet_blobs(
    file: str | BinaryIO | pa.NativeFile,
    source: str,
    blobs: BlobRules,
    max_bytes: int,
    groups: range | None,
    rows: Rows,
) -> Iterator[Record]:
    """Images or clips of these row groups, or of all; the offset is the row. Labels come from the label column.

    Rows are read one by one, so that memory holds a page and an image. If a group cannot be read to its end, each
    remaining row gives a failure.
    """
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as table:
            schema, metadata = table.schema_arrow, table.metadata
            sizes = [max(0, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
            groups = range(len(sizes)) if groups is None else groups
            if groups.stop > len(sizes):
                raise EOFError(f"the file has {len(sizes)} row groups, not {groups.stop}: it was changed")
            first = sum(sizes[: groups.start])
            rows.total = sum(sizes[groups.start : groups.stop])
            if problem := blob_column_problem(schema, blobs.column):
                message = f"{blobs.setting} = {blobs.column!r}: {problem}"
                yield from lost_rows(NO_COLUMN, source, first, rows.total, message)
                return
            labelled = schema.names.count(blobs.label_column) == 1
            columns = [blobs.column, *([blobs.label_column] if labelled else [])]
            names = class_names(schema, blobs.label_column)
            for group in groups:
                row, end = first, first + sizes[group]
                try:
                    for batch in table.iter_batches(1, [group], columns, use_threads=False):
                        for place in range(batch.num_rows):
                            label = batch.column(1)[place].as_py() if labelled else None
                            record = _row(batch.column(0)[place].as_py(), label, names, source, row + place, max_bytes)
                            if labelled and isinstance(record, Blob) and record.label is None:
                                record = replace(record, label="")  # its path does not name its class
                            yield record
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


def _row(value: Any, label: Any, names: list[str], source: str, row: int, max_bytes: int) -> Record:
    """The image or clip of a row, or its failure."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if data is None:
        message = "its bytes are null (a file that it names by a path is not opened)"
        return ReadFailure(reason="null", source=source, offset=row, message=message)
    if len(data) > max_bytes:
        message = f"it has {len(data)} bytes, more than corpus.max_document_mib = {max_bytes / (1 << 20):g} MiB"
        return ReadFailure(reason="too_large", source=source, offset=row, message=message)
    if isinstance(label, int) and not isinstance(label, bool):
        label = names[label] if 0 <= label < len(names) else str(label) if label >= 0 else None
    if label is not None and not isinstance(label, str):
        message = f"a label of type {type(label).__name__}, not text or a whole number"
        return ReadFailure(reason="bad_label", source=source, offset=row, message=message)
    return Blob("", source, row, data, label)


def class_names(schema: pa.Schema, column: str) -> list[str]:
    """Names of the classes of a label column, from the metadata that `datasets` writes; none if there are none."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
