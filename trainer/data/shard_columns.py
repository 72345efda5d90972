"""Columns of shard rows as NumPy arrays."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def document_keys(documents: pa.Table) -> NDArray[np.uint64]:
    """`(n,)` first eight bytes of each document's id: the key of all its random draws."""
    ids = _whole(documents.column("id"))
    raw = np.frombuffer(ids.buffers()[1], np.uint8).reshape(-1, 16)[ids.offset : ids.offset + len(ids)]
    return np.ascontiguousarray(raw[:, :8]).view("<u8").reshape(-1)


def ragged(column: pa.ChunkedArray) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and `(n + 1,)` offsets of a list column."""
    lists = _whole(column)
    return lists.values.to_numpy(), lists.offsets.to_numpy().astype(np.int64)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array; a single chunk, the usual case, is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
