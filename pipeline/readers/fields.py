"""Readers of several named values of each line or row: JSONL, CSV, TSV, Parquet.

A missing key, a value that is neither text nor a whole number, and damaged text are failures of their row.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from declutr.pipeline.readers.corpus import END, Fields, ReadFailure, Record, Value
from declutr.pipeline.readers.delimited import delimited_rows, short_row
from declutr.pipeline.readers.jsonl import explained_object, json_kind, json_lines
from declutr.pipeline.readers.plain_text import decode, is_wide, nul_bytes, unreadable
from declutr.pipeline.readers.streams import ByteStream
from declutr.pipeline.readers.tables import TABLE_ERRORS, Rows, as_bytes, lost_rows

FIELD_FORMATS = ("jsonl", "csv", "tsv", "parquet")
"""Formats of files whose rows have several values."""
MISSING_KEY = "missing_key"
_PARQUET_ROWS = 32
_SHOWN_CHARACTERS = 300

Keys = Mapping[str, str]
"""Key or column of each value, by the setting that names it."""


def read_json_fields(stream: ByteStream, source: str, keys: Keys, max_bytes: int, stop: int = END) -> Iterator[Record]:
    """The values of one JSON object a line."""
    names = list(keys.values())
    fields: list[Any] = [(f"value{number}", Any, msgspec.UNSET) for number in range(len(names))]
    renamed = {f"value{number}": name for number, name in enumerate(names)}
    parse = msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=renamed)).decode
    for line in json_lines(stream, source, stop):
        if isinstance(line, ReadFailure):
            yield line
            continue
        raw, offset = line
        try:
            values = msgspec.structs.astuple(parse(raw))
        except (ValueError, RecursionError):
            record, json_object = explained_object(bytes(raw), source, offset, names[0])
            if json_object is None:
                blank = not isinstance(record, ReadFailure)
                yield Fields("", source, offset, ()) if blank else record
                continue
            values = tuple(json_object.get(name, msgspec.UNSET) for name in names)
        if msgspec.UNSET in values:
            _, json_object = explained_object(bytes(raw), source, offset, names[0])
            yield missing_key(keys, json_object or {}, source, offset)
        else:
            yield _fields(values, source, offset, keys, max_bytes)


def read_delimited_fields(
    stream: ByteStream, source: str, keys: Keys, max_bytes: int, delimiter: str
) -> Iterator[Record]:
    """The values of every row. A row with more columns than the header is a failure: a quote is open or a field cut."""
    header: list[str] | None = None
    columns: list[int] | None = None
    num_rows = 0
    for row, fields in delimited_rows(stream, source, delimiter):
        num_rows += row >= 0
        if isinstance(fields, ReadFailure):
            yield fields
        elif header is None:
            header = fields
            if all(header.count(name) == 1 for name in keys.values()):
                columns = [header.index(name) for name in keys.values()]
        elif columns is None:
            yield missing_key(keys, header, source, row)
        elif not fields:
            yield Fields("", source, row, ())
        elif len(fields) != len(header):
            yield short_row(fields, header, source, row)
        else:
            raw = [fields[column].encode("utf-8", "surrogateescape") for column in columns]
            yield _decoded(raw, source, row, keys, max_bytes)
    if header is not None and columns is None and not num_rows:
        yield missing_key(keys, header, source, 0)


def read_parquet_fields(
    file: str | BinaryIO | pa.NativeFile, source: str, keys: Keys, max_bytes: int, rows: Rows
) -> Iterator[Record]:
    """The values of every row of a Parquet file; the offset is the row."""
    names = list(keys.values())
    row = 0
    try:
        with pq.ParquetFile(file) as table:
            rows.total = max(0, table.metadata.num_rows)
            if problem := fields_problem(table.schema_arrow, keys):
                yield from lost_rows(MISSING_KEY, source, 0, rows.total, problem)
                return
            for batch in table.iter_batches(_PARQUET_ROWS, columns=names, use_threads=False):
                columns = [_readable(batch.column(name)) for name in names]
                for place in range(batch.num_rows):
                    yield _decoded([column[place].as_py() for column in columns], source, row, keys, max_bytes)
                    row += 1
                rows.done = row
    except TABLE_ERRORS as error:
        yield unreadable(error, source, row)


def fields_problem(schema: pa.Schema, keys: Keys) -> str | None:
    """A problem of a table as a source of these values; None if it has one column for each."""
    if all(schema.names.count(name) == 1 for name in keys.values()):
        return None
    return missing_key(keys, schema.names, "", 0).message


def missing_key(keys: Keys, columns: Any, source: str, offset: int) -> ReadFailure:
    """The failure of a row without one of the keys, or with two columns of that name."""
    names = list(columns)
    setting, name = next(((s, n) for s, n in keys.items() if names.count(n) != 1), ("", ""))
    what = "more than one" if name in names else "no"
    message = f"{what} key {name!r}; found {sorted(map(str, names))}; set {setting} to one of them"
    if len(message) > _SHOWN_CHARACTERS:
        message = f"{what} key {name!r}; set {setting} to one of {sorted(map(str, names))}"[:_SHOWN_CHARACTERS]
    return ReadFailure(reason=MISSING_KEY, source=source, offset=offset, message=message)


def _readable(column: pa.Array) -> pa.Array:
    """A column whose texts are bytes.

    Raises:
        pa.ArrowException: its offsets or indices point outside its data.
    """
    if not pa.types.is_dictionary(column.type):
        return as_bytes(column)
    column = pa.DictionaryArray.from_arrays(column.indices, as_bytes(column.dictionary), safe=False)
    column.validate(full=True)
    return column


def _decoded(values: list[Any], source: str, offset: int, keys: Keys, max_bytes: int) -> Record:
    """The record of values whose texts are bytes."""
    texts: list[Any] = []
    for value in values:
        if not isinstance(value, bytes):
            texts.append(value)
            continue
        record = decode(value, source, -1)  # only the header of a file can start with a byte order mark
        if isinstance(record, ReadFailure):
            return record.model_copy(update={"offset": offset})
        texts.append(record.text)
    return _fields(tuple(texts), source, offset, keys, max_bytes)


def _fields(values: tuple[Any, ...], source: str, offset: int, keys: Keys, max_bytes: int) -> Record:
    """The record of a row; a failure if a value is no text, whole number or null."""
    good: list[Value] = []
    for (setting, name), value in zip(keys.items(), values, strict=True):
        if isinstance(value, float) and value.is_integer():  # explained_object reads numbers as floats
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, type(None))):
            kind = json_kind(_start(value))
            message = f"the value of {name!r} ({setting}) is {kind}, not text"
            return ReadFailure(reason="not_text", source=source, offset=offset, message=message)
        if isinstance(value, str):
            try:
                size = len(value.encode())
            except UnicodeEncodeError as error:  # an escaped lone surrogate is valid JSON, but not Unicode text
                return ReadFailure(reason="invalid_utf8", source=source, offset=offset, message=str(error.reason))
            if size > max_bytes:
                message = f"the value of {name!r} ({setting}) has {size} bytes, more than corpus.max_document_mib"
                return ReadFailure(reason="too_large", source=source, offset=offset, message=message)
            if is_wide(value):
                return nul_bytes(source, offset)
        good.append(value)
    return Fields("", source, offset, tuple(good))


def _start(value: object) -> str:
    """First character of a value as JSON."""
    if isinstance(value, bool):
        return "t"
    return "{" if isinstance(value, dict) else "[" if isinstance(value, list) else "0"
