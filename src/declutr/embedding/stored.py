"""Texts and vectors of an index, mapped and checked: a folder may come from someone else."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.errors import UsageError
from declutr.embedding.note import mapped
from declutr.embedding.postings import wrong_file
from declutr.embedding.units import CHUNK_ROWS, VectorType

SCHEMA = pa.schema(
    {"record": pa.int64(), "text": pa.large_string(), "id": pa.string(), "source": pa.string(), "number": pa.int64()}
)  # columns of the texts of an index. The texts of a batch may have more than 2 GiB, the limit of `string`.
PASSAGE_SCHEMA = pa.schema([*SCHEMA, ("line", pa.int64()), ("heading", pa.string())])
"""The same for an index of passages."""


@dataclass(frozen=True)
class Stored:
    """One text of an index."""

    row: int
    record: int  # number of the record in the inputs, those that were skipped included
    id: str | None  # None if the embeddings have no ids
    source: str
    number: int | None  # number of the record in its file, from 1; None if the source is a field
    text: str  # the text, or the passage
    # Line of the text at which the passage starts, from 1; None for a whole text, as the next one.
    line: int | None = None
    heading: str | None = None  # headings above the passage


_MOST_ALLOCATED_BYTES = 2**24  # a mapped batch that is not compressed allocates nothing


class StoredTexts:
    """Memory-mapped file of texts."""

    def __init__(self, path: Path, rows: int, passages: bool = False) -> None:
        self._path, self._checked = path, dict[int, pa.RecordBatch]()
        schema = PASSAGE_SCHEMA if passages else SCHEMA
        try:
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes, before = [], pa.total_allocated_bytes()
            for number in range(self._file.num_record_batches):
                batch = self._file.get_batch(number)  # held while its memory is counted
                sizes.append(batch.num_rows)
                if pa.total_allocated_bytes() > before + _MOST_ALLOCATED_BYTES:
                    raise wrong_file(self._path, "its batches are compressed")
        except (pa.ArrowException, OSError) as error:
            raise wrong_file(self._path, str(error)) from error
        # All batches but the last are full, because `at` finds a row by division.
        if self._file.schema != schema or sum(sizes) != rows or any(size != CHUNK_ROWS for size in sizes[:-1]):
            raise wrong_file(self._path, f"not {rows:,} rows of {', '.join(schema.names)}")

    def at(self, row: int) -> Stored:
        """Text of a row."""
        batch, place = divmod(row, CHUNK_ROWS)
        values: dict[str, Any] = self._batch(batch).slice(place, 1).to_pylist()[0]
        # an altered file may have nulls
        return Stored(row, **values | {name: values[name] or "" for name in ("source", "text")})

    def __iter__(self) -> Iterator[str]:
        """Texts with their headings, in the order of the rows."""
        for number in range(self._file.num_record_batches):
            batch = self._batch(number)
            headings = batch.column("heading").to_pylist() if "heading" in batch.schema.names else [None] * len(batch)
            for text, heading in zip(batch.column("text").to_pylist(), headings, strict=True):
                yield f"{heading}\n{text or ''}" if heading else text or ""

    def first_rows(self) -> NDArray[np.int64]:
        """`(documents,)` first row of each document."""
        columns = [np.empty(0, np.int64)]
        for number in range(self._file.num_record_batches):
            column = self._file.get_batch(number).column("record")
            try:
                column.validate()
                columns.append(column.to_numpy())  # refuses nulls
            except pa.ArrowException as error:
                raise wrong_file(self._path, str(error)) from error
        records = np.concatenate(columns)
        if (np.diff(records, prepend=0) < 0).any():
            raise wrong_file(self._path, "its records do not ascend from 0")
        return np.flatnonzero(np.diff(records, prepend=-1))

    def _batch(self, number: int) -> pa.RecordBatch:
        """Batch with checked offsets and UTF-8 texts."""
        if number not in self._checked:
            batch = self._file.get_batch(number)
            try:
                batch.validate(full=True)  # offsets beyond the file would end the process
            except pa.ArrowException as error:
                raise wrong_file(self._path, str(error)) from error
            self._checked[number] = batch
        return self._checked[number]


# Numbers that are cast at once stay in the processor's cache, and BLAS multiplies so few without threads, which on a
# busy machine wait for each other longer than they compute.
_CAST_VALUES = 2**18


class StoredVectors:
    """Mapped vectors `(rows, size)` of an .npy file: float32 of length 1, or int8, of which the direction counts.

    int8 vectors are compared with queries that are not rounded, so a search computes their cosines to float32.
    """

    def __init__(self, path: Path, rows: int, size: int, dtype: VectorType) -> None:
        self._vectors = mapped(path, rows, size, dtype)
        rows_at_once = CHUNK_ROWS if dtype == "float32" else max(1, _CAST_VALUES // size)
        self._chunks = [slice(start, start + rows_at_once) for start in range(0, rows, rows_at_once)]
        self._lengths: NDArray[np.float32] | None = None
        if dtype == "int8":
            self._lengths = np.zeros(rows, np.float32)
            for part in self._chunks:
                chunk = self._vectors[part].astype(np.float32)
                self._lengths[part] = np.sqrt(np.einsum("ij,ij->i", chunk, chunk)).clip(1)  # a null row stays null
        # in chunks: the answers for all numbers would take a byte each
        elif not all(np.isfinite(self._vectors[part]).all() for part in self._chunks):
            raise UsageError(f"{path} holds numbers that are not finite; build the index again")

    def cosines(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """`(queries, rows)` cosines of queries `(queries, size)` of length 1."""
        if self._lengths is None:
            return queries @ self._vectors.T
        products = np.empty((len(queries), len(self._vectors)), np.float32)
        for part in self._chunks:  # a whole copy in float32 would be larger than the index
            products[:, part] = queries @ self._vectors[part].astype(np.float32).T
        return products / self._lengths
