"""Texts and vectors of an index, checked before use because the folder may come from somebody else."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.evaluation.embedding.config import EmbedError

CHUNK_ROWS = 4096
SCHEMA = pa.schema([("text", pa.string()), ("id", pa.string()), ("source", pa.string())])


@dataclass(frozen=True)
class Stored:
    """One text of an index: row, id if any, origin, text."""

    row: int
    id: str | None
    source: str
    text: str


class StoredTexts:
    """Memory-mapped file of texts.

    Raises:
        EmbedError: the file is cut off, altered, or holds something else.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._checked = path, dict[int, pa.RecordBatch]()
        try:
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            number = self._file.num_record_batches
            sizes = [self._file.get_batch(batch).num_rows for batch in range(number)]
        except (pa.ArrowException, OSError) as error:
            raise self._wrong(str(error)) from error
        if self._file.schema != SCHEMA or sum(sizes) != rows or any(size != CHUNK_ROWS for size in sizes[:-1]):
            raise self._wrong(f"not {rows:,} rows of text, id and source")

    def at(self, row: int) -> Stored:
        """Text of a row.

        Raises:
            EmbedError: the part of the file with this row is altered.
        """
        batch, place = divmod(row, CHUNK_ROWS)
        found: dict[str, Any] = self._batch(batch).slice(place, 1).to_pylist()[0]
        return Stored(row, found["id"], found["source"] or "", found["text"] or "")

    def _batch(self, number: int) -> pa.RecordBatch:
        """Batch with checked offsets and UTF-8 texts; an unchecked one could end the process."""
        if number not in self._checked:
            batch = self._file.get_batch(number)
            try:
                batch.validate(full=True)
            except pa.ArrowException as error:
                raise self._wrong(str(error)) from error
            self._checked[number] = batch
        return self._checked[number]

    def _wrong(self, why: str) -> EmbedError:
        return EmbedError(f"{self._path} is cut off, altered, or not of `declutr index` ({why}); build the index again")


def mapped(path: Path, rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Map the vectors `(rows, size)` of an .npy file; pickled objects are never read.

    Raises:
        EmbedError: the file is cut off, altered, or of another shape or type.
    """
    try:
        found: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise EmbedError(f"{path} cannot be read as vectors ({error})") from error
    if found.shape != (rows, size) or found.dtype != np.dtype(dtype):
        raise EmbedError(f"{path} holds {found.shape} of {found.dtype}, expected {(rows, size)} of {dtype}")
    return found


def stored_vectors(path: Path, rows: int, size: int) -> NDArray[np.float32]:
    """Vectors `(rows, size)` of an exact index, all finite.

    Raises:
        EmbedError: as for `mapped`, or a number is not finite.
    """
    found: NDArray[np.float32] = mapped(path, rows, size, "float32")
    if not all(np.isfinite(found[start : start + CHUNK_ROWS]).all() for start in range(0, rows, CHUNK_ROWS)):
        raise EmbedError(f"{path} holds numbers that are not finite; build the index again")
    return found
