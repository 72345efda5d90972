"""From the values of one row to its record: a text, several fields, or an image or clip.

Each kind of row is a class. The containers of tables.py read only its columns, and give it their values row by row.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa

from declutr.common.console.terminal import shorten
from declutr.pipeline.readers.corpus import (
    MIB,
    NO_TEXT,
    Blob,
    Fields,
    Keys,
    ReadFailure,
    Record,
    Records,
    Rules,
    Value,
    failed,
    joined,
    missing,
)
from declutr.pipeline.readers.lines import decode, documents, explained_object, json_decoder, json_lines, nul_bytes
from declutr.pipeline.readers.streams import Body

MISSING_KEY = "missing_key"
# Rows of a batch if all columns of text are dictionaries: each batch decodes the whole dictionaries again.
_DICTIONARY_ROWS = 4096
_MIXED_ROWS = 32  # rows of a batch if only some are: the other columns hold the texts of all its rows
_FIELD_ROWS = 32  # rows of a batch of several values
_SHOWN_CHARACTERS = 200
# Types of text, with the type that has the same bytes and does not promise UTF-8.
_TEXTS = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def as_bytes(column: pa.Array) -> pa.Array:
    """Texts as bytes, so that one text that is not UTF-8 does not affect the others."""
    if pa.types.is_dictionary(column.type):
        # Never decoded as a whole, because a few large texts of a dictionary may stand for any number of rows.
        column = pa.DictionaryArray.from_arrays(column.indices, as_bytes(column.dictionary), safe=False)
    elif column.type in _TEXTS:
        column = column.view(_TEXTS[column.type])
    column.validate(full=True)  # Arrow reads wherever the offsets of a file point
    return column


class TextRows:
    """Rows with a text, in one column or in several that are joined."""

    setting = "corpus.text_field"
    no_column = NO_TEXT

    def __init__(self, rules: Rules) -> None:
        self.names = rules.text_names
        self._max_bytes, self._numbers = rules.max_bytes, rules.numbers
        self.setting_value = self.names[0] if len(self.names) == 1 else f"[{', '.join(self.names)}]"
        """The names as the setting has them."""

    def problem(self, schema: pa.Schema) -> str | None:
        """The problem of a table as a source of texts; None if it has the text columns."""
        if problem := self.header_problem(schema.names):
            return problem
        for name in self.names:
            kind = schema.field(name).type
            value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
            is_text = value_type in (*_TEXTS, *_TEXTS.values(), pa.null())
            if not is_text and not (self._numbers and pa.types.is_integer(kind)):
                return f"column {name!r} is of type {kind}, not text"
        return None

    def batch_rows(self, schema: pa.Schema) -> int:
        """Rows to read at a time: memory holds a page and a text, or a dictionary and a text."""
        kinds = [pa.types.is_dictionary(schema.field(name).type) for name in self.names]
        return _DICTIONARY_ROWS if all(kinds) else _MIXED_ROWS if any(kinds) else 1

    def of_batch(self, batch: pa.RecordBatch, source: str, first_row: int) -> Records:
        """The documents of a batch, with the row as offset; a row of nulls gives a failure."""
        columns = [_texts(batch.column(name)) for name in self.names]
        for row, values in enumerate(zip(*columns, strict=True), first_row):
            texts = [value.as_buffer() for value in values if value is not None and value.is_valid]
            if texts:
                text = texts[0] if len(columns) == 1 else joined(map(bytes, texts))
                yield from documents(text, source, row, self._max_bytes)
            else:
                yield failed(NO_TEXT, source, row, "the text is null")

    def header_problem(self, header: Sequence[str]) -> str | None:
        """The problem of a header: a column of the text is missing or occurs twice; None if there is none."""
        repeated = [f"{header.count(name)} columns {name!r}" for name in self.names if header.count(name) > 1]
        return missing(self.names, header) or next(iter(repeated), None)

    def is_cut(self, fields: list[str], header: list[str], columns: list[int]) -> bool:
        """Returns True for a row whose text may be cut by a delimiter."""
        return len(fields) <= max(columns) or any(field.strip() for field in fields[len(header) :])

    def of_row(self, values: list[bytes], source: str, row: int) -> Records:
        """The documents of a row of a delimited file; no values are an empty document, so that totals close."""
        return documents(joined(values), source, row, self._max_bytes)


def _texts(column: pa.Array) -> Any:
    """The values of a column as scalars of bytes, or None."""
    column = as_bytes(column.cast(pa.string()) if pa.types.is_integer(column.type) else column)
    if not pa.types.is_dictionary(column.type):
        return column
    texts = column.dictionary
    return (None if place is None else texts[place] for place in column.indices.to_pylist())


class FieldRows:
    """Rows with several values; a missing key, damaged text, or what is neither text nor whole number fails its row."""

    setting = "content"
    no_column = MISSING_KEY

    def __init__(self, rules: Rules) -> None:
        self.keys, self._max_bytes = rules.keys, rules.max_bytes
        self.names = tuple(rules.keys.values())

    def problem(self, schema: pa.Schema) -> str | None:
        """A problem of a table as a source of these values; None if it has one column for each."""
        return self.header_problem(schema.names)

    def batch_rows(self, _: pa.Schema) -> int:
        """Rows to read at a time."""
        return _FIELD_ROWS

    def of_batch(self, batch: pa.RecordBatch, source: str, first_row: int) -> Records:
        """The values of the rows of a batch."""
        columns = [as_bytes(batch.column(name)) for name in self.names]
        for place in range(batch.num_rows):
            yield from self.of_row([column[place].as_py() for column in columns], source, first_row + place)

    def header_problem(self, header: Sequence[str]) -> str | None:
        """The problem of the header of a delimited file."""
        return None if all(header.count(name) == 1 for name in self.names) else missing_key(self.keys, header)

    def is_cut(self, fields: list[str], header: list[str], _: list[int]) -> bool:
        """Returns True for a row of another length than the header: a quote is open or a field is cut."""
        return len(fields) != len(header)

    def of_row(self, values: list[Any], source: str, row: int) -> Records:
        """The record of values whose texts are bytes; no values are a blank line."""
        texts: list[Any] = []
        for value in values:
            # -1, because `decode` removes a byte order mark at offset 0; only the header of a file can have one.
            record = decode(value, source, -1) if isinstance(value, bytes) else None
            if isinstance(record, ReadFailure):
                yield record.model_copy(update={"offset": row})
                return
            texts.append(value if record is None else record.text)
        yield self.of_values(texts, source, row) if values else Fields("", source, row, ())

    def of_values(self, values: Sequence[Any], source: str, offset: int) -> Record:
        """The record of a row; a failure if a value is no text, whole number or null."""
        good: list[Value] = []
        for (setting, name), value in zip(self.keys.items(), values, strict=True):
            subject = f"the value of {name!r} ({setting})"
            if isinstance(value, float) and value.is_integer():  # explained_object reads long numbers as floats
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, (str, int, type(None))):  # a bool is an int to Python
                kinds = {dict: "an object", list: "a list", bool: str(value).lower()}
                kind = kinds.get(type(value), "a number")
                return failed("not_text", source, offset, f"{subject} is {kind}, not text")
            if isinstance(value, str):
                try:
                    size = len(value.encode())
                except UnicodeEncodeError as error:  # an escaped lone surrogate is valid JSON, but not Unicode text
                    return failed("invalid_utf8", source, offset, error.reason)
                if size > self._max_bytes:
                    message = f"{subject} has {size} bytes, more than corpus.max_document_mib"
                    return failed("too_large", source, offset, message)
                if "\0" in value:
                    return nul_bytes(source, offset)
            good.append(value)
        return Fields("", source, offset, tuple(good))


def missing_key(keys: Keys, columns: Any) -> str:
    """The message on a row without one of the keys, or with two columns of that name."""
    names = sorted(map(str, columns))
    setting, name = next(((s, n) for s, n in keys.items() if names.count(n) != 1), ("", ""))
    doubled = f"more than one key {name!r}; found {shorten(str(names), _SHOWN_CHARACTERS)}"
    return f"{missing((name,), names, 'key') or doubled}; set {setting} to a key of the file"


def read_json_fields(body: Body, lines: Callable[..., Iterator[Any]] = json_lines) -> Records:
    """The values of one JSON object a line (or value)."""
    rows, source = FieldRows(body.rules), body.source
    parse = json_decoder(rows.names, Any, msgspec.UNSET).decode
    for line in lines(body):
        if isinstance(line, ReadFailure):
            yield line
            continue
        raw, offset = line
        try:
            values = msgspec.structs.astuple(parse(raw))
        except (ValueError, RecursionError):
            record, json_object = explained_object(bytes(raw), source, offset, rows.names[0])
            if json_object is None:
                yield record if isinstance(record, ReadFailure) else Fields("", source, offset, ())
                continue
            values = tuple(json_object.get(name, msgspec.UNSET) for name in rows.names)
        if msgspec.UNSET in values:
            _, json_object = explained_object(bytes(raw), source, offset, rows.names[0])
            yield failed(MISSING_KEY, source, offset, missing_key(rows.keys, json_object or {}))
        else:
            yield rows.of_values(values, source, offset)


class BlobRows:
    """Rows with the bytes of an image or a clip, and its label if there is a label column."""

    no_column = "no_column"

    def __init__(self, rules: Rules) -> None:
        blobs = rules.blobs
        assert blobs is not None
        self.setting, self._label_column, self._max_bytes = blobs.setting, blobs.label_column, rules.max_bytes
        self._column = self.setting_value = blobs.column
        self.names: tuple[str, ...] = (blobs.column,)
        self._class_names: list[str] = []

    def problem(self, schema: pa.Schema) -> str | None:
        """The problem of a table as a source of images or clips; None if it has a column of bytes."""
        column = self._column
        if schema.names.count(column) != 1:
            return f"no column {column!r} (or more than one); found {schema.names}"[:200]
        kind = schema.field(column).type
        if pa.types.is_struct(kind):
            names = [kind.field(number).name for number in range(kind.num_fields)]
            kind = kind.field("bytes").type if names.count("bytes") == 1 else kind
        is_bytes = kind in (pa.binary(), pa.large_binary(), pa.binary_view())
        return None if is_bytes else f"column {column!r} is of type {kind}, not bytes or a struct with bytes"

    def batch_rows(self, schema: pa.Schema) -> int:
        """One row at a time, so that memory holds a page and an image. Also sets the label column for `of_batch`."""
        self._class_names = class_names(schema, self._label_column)
        if schema.names.count(self._label_column) == 1:
            self.names = (self._column, self._label_column)
        return 1

    def of_batch(self, batch: pa.RecordBatch, source: str, first_row: int) -> Records:
        """The images or clips of a batch. An empty label stays empty: the path does not name the class of a row."""
        labelled = len(self.names) > 1
        for place in range(batch.num_rows):
            try:
                label = batch.column(1)[place].as_py() if labelled else None
                record = self._row(batch.column(0)[place].as_py(), label, source, first_row + place)
            except UnicodeDecodeError as error:
                record = failed("invalid_utf8", source, first_row + place, f"its label or its path: {error.reason}")
            yield replace(record, label="") if labelled and isinstance(record, Blob) and not record.label else record

    def _row(self, value: Any, label: Any, source: str, row: int) -> Record:
        """The image or clip of a row, or its failure."""
        data = value.get("bytes") if isinstance(value, dict) else value
        names = self._class_names
        if data is None:
            return failed("null", source, row, "its bytes are null (a file that it names by a path is not opened)")
        if len(data) > self._max_bytes:
            limit = f"corpus.max_document_mib = {self._max_bytes / MIB:g} MiB"
            return failed("too_large", source, row, f"it has {len(data)} bytes, more than {limit}")
        if isinstance(label, int) and not isinstance(label, bool):
            name = names[label] if 0 <= label < len(names) else str(label)
            label = name if label >= 0 else None  # a negative number stands for no class
        if label is not None and not isinstance(label, str):
            message = f"a label of type {type(label).__name__}, not text or a whole number"
            return failed("bad_label", source, row, message)
        return Blob("", source, row, data, label)


def class_names(schema: pa.Schema, column: str) -> list[str]:
    """Names of the classes of a label column, from the metadata that `datasets` writes; none if there are none."""
    try:
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


Rows = TextRows | FieldRows | BlobRows


def rows_of(rules: Rules) -> Rows:
    """The kind of rows of a corpus."""
    return BlobRows(rules) if rules.blobs else FieldRows(rules) if rules.keys else TextRows(rules)


def column_problem(path: str, rows: TextRows | BlobRows, problem: str) -> str:
    """The problem of a table without the column of a text, image or clip; each of its rows gives a failure."""
    is_of_name = isinstance(rows, TextRows) and "; its " not in problem  # what `missing` says of the file is no name's
    remedy = "; name another one, or several to join" if is_of_name else ""
    return f"{rows.setting} = {rows.setting_value}: {path}: {problem}{remedy}"
