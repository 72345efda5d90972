"""The output of `declutr embed` with its note, for reading."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Precision, first_problem
from declutr.common.errors import UsageError
from declutr.common.paths import LONGEST_NAME, folder_problem
from declutr.common.storage import read_json
from declutr.embedding import check_embeddings
from declutr.embedding.units import CHUNK_ROWS, Coverage, EmbedConfig
from declutr.encoders.protocol import unit_rows


class Note(Coverage):
    """Origin of a file of embeddings, stored next to it as OUT.json."""

    config: EmbedConfig
    fingerprint: str  # Fingerprint of the encoder and its treatment of long texts
    precision: Precision  # precision of the computation
    size: int  # numbers in an embedding of the file
    rows: int
    skipped: dict[str, int]  # skipped records that could not be read, by reason
    lost: list[str] = Field(default_factory=list)  # files of which a part, or all, could not be read
    job: str  # SHA-256 of inputs, encoder and settings
    num_bytes: int  # size of the file of embeddings
    sha256: str  # of the file of embeddings


def note_path(output: Path) -> Path:
    """Path of the note of a file of embeddings."""
    return output.parent / f"{output.name}.json"  # `with_name` refuses a folder without a name, as / and .


def parts_folder(output: Path) -> Path:
    """Folder of the finished units of an output that is not complete."""
    return output.with_name(f".{output.name}.parts")


def output_problem(output: Path) -> str | None:
    """The reason why embeddings cannot be written here, or would replace a file of another origin; None if neither."""
    temporary = f".{note_path(output).name}.{os.getpid()}.tmp"  # of `atomic_file`, the longest beside it
    if (excess := len(os.fsencode(temporary)) - LONGEST_NAME) > 0:
        return f"its name is too long by {excess} bytes"
    if parts_folder(output).is_dir() or _is_note(note_path(output)):
        return None
    for path in (output, note_path(output)):
        if path.exists():
            return f"{path.name} exists without its {'embeddings' if path != output else 'note'}; name another file"
    return folder_problem(output.parent)


def _is_note(path: Path) -> bool:
    """Whether a file is a note, also of another version."""
    try:
        values = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and {"fingerprint", "num_bytes"} <= values.keys()


def read_note(output: Path) -> Note:
    """Read the note of a file of embeddings."""
    check_embeddings(output)
    path = note_path(output)
    if output.suffix == ".json" and output.with_suffix("").is_file():
        raise UsageError(f"{output}: is a note; name the embeddings {output.with_suffix('')}")
    try:
        note = Note.model_validate_json(path.read_bytes())
    except ValidationError as error:
        why = first_problem(error, Note)
        raise UsageError(f"{path}: is no note of this version of `declutr embed` ({why}); embed again") from error
    except OSError as error:
        raise UsageError(
            f"{output}: has no note {path.name} of `declutr embed` next to it ({error.strerror}); copy the note, too. "
            f"If it holds texts, embed them first: declutr embed MODEL {output} --output FILE.parquet"
        ) from error
    if output.stat().st_size != note.num_bytes:
        raise UsageError(f"{output}: its size differs from its note {path.name}; embed again")
    return note


def mapped(path: Path, rows: int, size: int, dtype: str) -> NDArray[Any]:
    """Map the vectors `(rows, size)` of an .npy file; pickled objects are never read."""
    try:
        vectors: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    # NumPy parses the header as a Python literal, so a damaged one raises any of these
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise UsageError(f"{path} cannot be read as vectors ({error})") from error
    if vectors.shape != (rows, size) or vectors.dtype != np.dtype(dtype):
        raise UsageError(f"{path} holds {vectors.shape} of {vectors.dtype}, expected {(rows, size)} of {dtype}")
    return vectors


def unit_vectors(embeddings: Path, note: Note) -> Iterator[NDArray[np.float32]]:
    """Yield chunks of embeddings, scaled to length 1."""
    return (unit_rows(chunk.astype(np.float32)) for chunk in finite_vectors(embeddings, note))


def finite_vectors(embeddings: Path, note: Note) -> Iterator[NDArray[Any]]:
    """Yield chunks of embeddings of up to `CHUNK_ROWS` rows, as they are in the file."""
    start = 0
    for chunk in _stored(embeddings, note):
        if len(bad := np.flatnonzero(~np.isfinite(chunk).all(axis=1))):
            raise UsageError(f"{embeddings}: the embedding of row {start + bad[0]:,} is not finite; embed again")
        yield chunk
        start += len(chunk)


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
    # also no such column, another number of values, and numbers in place of lists
    except (pa.ArrowException, IndexError, ValueError, AttributeError) as error:
        raise UsageError(f"{embeddings}: cannot read {note.rows:,} embeddings from it ({error})") from error
    if rows != note.rows:
        raise UsageError(f"{embeddings}: holds {rows:,} embeddings, but its note says {note.rows:,}; embed again")
