"""The output of `declutr embed` with its note."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray
from pydantic import ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.errors import UsageError
from declutr.common.storage import atomic_file
from declutr.embedding.units import EmbedConfig, EmbeddingSidecar, Shape, part_schema, shaped
from declutr.encoders.protocol import Precision

CHUNK_ROWS = 4096


def mapped(path: Path, rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Map the vectors `(rows, size)` of an .npy file; pickled objects are never read.

    Raises:
        UsageError: the file is cut off, altered, or of another shape or type.
    """
    try:
        vectors: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise UsageError(f"{path} cannot be read as vectors ({error})") from error
    if vectors.shape != (rows, size) or vectors.dtype != np.dtype(dtype):
        raise UsageError(f"{path} holds {vectors.shape} of {vectors.dtype}, expected {(rows, size)} of {dtype}")
    return vectors


class Note(Strict):
    """Origin of a file of embeddings, stored next to it as OUT.json."""

    config: EmbedConfig
    fingerprint: str
    """Fingerprint of the encoder and its treatment of long texts."""
    precision: Precision | None = None
    """Precision of the computation; None in a note of an earlier version."""
    size: int
    """Numbers in an embedding of the file."""
    rows: int
    skipped: dict[str, int]
    """Skipped records that could not be read, by reason."""
    job: str
    """SHA-256 of inputs, encoder and settings."""
    num_bytes: int
    """Size of the file of embeddings."""


def note_path(output: Path) -> Path:
    """Path of the note of a file of embeddings."""
    return output.with_name(f"{output.name}.json")


def read_note(output: Path) -> Note:
    """Read the note of a file of embeddings.

    Raises:
        UsageError: the note is missing, or was written for another file.
    """
    path = note_path(output)
    if not output.is_file():
        raise UsageError(f"{output}: no such file; name a file that `declutr embed` has written")
    try:
        note = Note.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else first_problem(error, Note)
        raise UsageError(f"{output}: has no note {path.name} of `declutr embed` next to it ({why})") from error
    if output.stat().st_size != note.num_bytes:
        raise UsageError(f"{output}: its size differs from its note {path.name}; embed again")
    return note


def assemble(folder: Path, sidecars: list[EmbeddingSidecar], config: EmbedConfig, size: int) -> int:
    """Write the output from the parts, in the order of the inputs; return its number of rows."""
    schema = part_schema(size, config)
    rows = sum(sidecar.written for sidecar in sidecars)
    with atomic_file(config.output) as aside:
        if config.output.suffix == ".npy":
            kind = schema.field("embedding").type
            with aside.open("wb") as stream:
                write_npy_header(stream, (rows, kind.list_size), kind.value_type.to_pandas_dtype())
                for batch in _batches(folder, sidecars):
                    stream.write(memoryview(batch.column("embedding").flatten().to_numpy()))
        else:
            with pq.ParquetWriter(aside, schema) as writer:
                for batch in _batches(folder, sidecars):
                    writer.write_table(pa.Table.from_batches([batch]))
        note_path(config.output).unlink(missing_ok=True)  # that of an earlier job would vouch for this output
    return rows


def write_npy_header(stream: BinaryIO, shape: tuple[int, int], dtype: DTypeLike) -> None:
    """Start an .npy file whose rows are written one after the other.

    A file mapped for writing would end the process on a full disk.
    """
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)


def _batches(folder: Path, sidecars: list[EmbeddingSidecar]) -> Iterator[pa.RecordBatch]:
    """Record batches of all parts, with rows counted across units."""
    first = 0
    for sidecar in sidecars:
        with pa.memory_map(str(folder / f"{sidecar.unit}.arrow")) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                rows = pa.array(batch.column("row").to_numpy() + first)
                yield batch.set_column(0, batch.schema.field("row"), rows)
        first += sidecar.read


def unit_vectors(embeddings: Path, note: Note) -> Iterator[NDArray[np.float32]]:
    """Yield chunks of embeddings, scaled to length 1."""
    unit = Shape(normalise=True)
    return (shaped(chunk.astype(np.float32), unit) for chunk in finite_vectors(embeddings, note))


def finite_vectors(embeddings: Path, note: Note) -> Iterator[NDArray[Any]]:
    """Yield chunks of embeddings of up to `CHUNK_ROWS` rows, as they are in the file.

    Raises:
        UsageError: a number is not finite, or the file has other embeddings than its note says.
    """
    start = 0
    for chunk in _stored(embeddings, note):
        if len(bad := np.flatnonzero(~np.isfinite(chunk).all(axis=1))):
            raise UsageError(f"{embeddings}: the embedding of row {start + bad[0]:,} is not finite; embed again")
        yield chunk
        start += len(chunk)


def numbered(chunks: Iterator[NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Chunks with the row of the first vector of each."""
    start = 0
    for chunk in chunks:
        yield start, chunk
        start += len(chunk)


def rows_of(chunks: Iterator[NDArray[Any]], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Vectors `(len(rows), size)` of ascending rows."""
    return np.concatenate(
        [chunk[rows[(rows >= start) & (rows < start + len(chunk))] - start] for start, chunk in numbered(chunks)]
    )


def _stored(embeddings: Path, note: Note) -> Iterator[NDArray[Any]]:
    if embeddings.suffix == ".npy":
        whole = mapped(embeddings, note.rows, note.size, note.config.shape.dtype)
        yield from (whole[start : start + CHUNK_ROWS] for start in range(0, len(whole), CHUNK_ROWS))
        return
    rows = 0
    try:
        with pq.ParquetFile(embeddings) as file:
            for batch in file.iter_batches(CHUNK_ROWS, columns=["embedding"]):
                column = batch.column(0)
                yield column.flatten().to_numpy().reshape(len(column), note.size)
                rows += len(column)
    except (pa.ArrowException, IndexError, ValueError, AttributeError) as error:
        raise UsageError(f"{embeddings}: cannot read {note.rows:,} embeddings from it ({error})") from error
    if rows != note.rows:
        raise UsageError(f"{embeddings}: holds {rows:,} embeddings, but its note says {note.rows:,}; embed again")
