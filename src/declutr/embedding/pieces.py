"""The rows of each piece of the input, of an earlier output or newly embedded, and the output that joins them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from declutr.common.storage import atomic_file
from declutr.embedding.note import note_path
from declutr.embedding.units import CHUNK_ROWS, Piece
from declutr.pipeline.job.units import Unit

_KEY = b"declutr.pieces"  # in the metadata of a Parquet file: each piece's identity and counts, in the order of rows


def joined_unit(name: str, pieces: Sequence[Unit]) -> Unit:
    """One unit of several pieces."""
    states = {path: state for piece in pieces for path, state in piece.file_states.items()}
    parts = [part for piece in pieces for part in piece.parts]
    return pieces[0].model_copy(update={"name": name, "parts": parts, "file_states": states})


@dataclass(frozen=True)
class Stored:
    """A piece of the input whose rows are in a file."""

    piece: Piece
    file: Path  # Parquet: an earlier output, or a unit
    start: int  # its first row in the file
    records: int  # records of the file before it, by which its column `row` is larger


def stored_in(file: Path, pieces: Iterable[tuple[str, Piece]]) -> dict[str, Stored]:
    """The pieces of a file in the order of its rows, by identity."""
    stored, start, records = dict[str, Stored](), 0, 0
    for identity, piece in pieces:
        stored[identity] = Stored(piece, file, start, records)
        start, records = start + piece.written, records + piece.read
    return stored


def earlier(output: Path) -> dict[str, Stored]:
    """Pieces of a finished output by their identity; none of an .npy file, or of a version that did not name them."""
    metadata = (pq.read_metadata(output).metadata or {}) if output.suffix == ".parquet" else {}
    pieces = json.loads(metadata.get(_KEY, b"[]"))
    return stored_in(output, ((identity, Piece.model_validate(values)) for identity, values in pieces))


def write_joined(output: Path, pieces: Mapping[str, Stored], schema: pa.Schema) -> None:
    """Writes the rows of all pieces, in their order; `pieces` is by identity."""
    with atomic_file(output) as aside:
        if output.suffix == ".npy":
            kind = schema.field("embedding").type
            rows = sum(stored.piece.written for stored in pieces.values())
            with aside.open("wb") as stream:
                write_npy_header(stream, (rows, kind.list_size), kind.value_type.to_pandas_dtype())
                for table in _numbered(pieces.values()):
                    for chunk in table.column("embedding").chunks:
                        stream.write(memoryview(chunk.flatten().to_numpy()))
        else:
            with pq.ParquetWriter(aside, schema) as writer:
                waiting, rows = list[pa.Table](), 0  # pieces may have few rows, and a row group has many
                for table in _numbered(pieces.values()):
                    waiting.append(table)
                    rows += table.num_rows
                    if rows >= CHUNK_ROWS:
                        writer.write_table(pa.concat_tables(waiting))
                        waiting, rows = [], 0
                if waiting:
                    writer.write_table(pa.concat_tables(waiting))
                counts = [(name, stored.piece.model_dump(exclude_defaults=True)) for name, stored in pieces.items()]
                writer.add_key_value_metadata({_KEY: json.dumps(counts)})
        note_path(output).unlink(missing_ok=True)  # that of an earlier job would vouch for this output


def _numbered(pieces: Iterable[Stored]) -> Iterator[pa.Table]:
    """Rows of all pieces, with records counted across them."""
    first = 0
    for file, neighbours in groupby(pieces, lambda stored: stored.file):
        with pq.ParquetFile(file) as source:
            ends = np.cumsum([source.metadata.row_group(number).num_rows for number in range(source.num_row_groups)])
            read_group = lru_cache(1)(source.read_row_group)  # the next piece is often in the same one
            for stored in neighbours:
                start, stop = stored.start, stored.start + stored.piece.written
                while start < stop:
                    number = int(np.searchsorted(ends, start, side="right"))
                    group = read_group(number)
                    table = group.slice(start - (ends[number] - group.num_rows), stop - start)
                    rows = pa.array(table.column("row").to_numpy() - stored.records + first)
                    yield table.set_column(0, table.schema.field("row"), rows)
                    start += table.num_rows
                first += stored.piece.read


def write_npy_header(stream: BinaryIO, shape: tuple[int, int], dtype: DTypeLike) -> None:
    """Start an .npy file whose rows follow one by one: one mapped for writing would end the process on a full disk."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
