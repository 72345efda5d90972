"""Map of an index for Embedding Atlas: texts, vectors, and places in the plane in which the vectors differ most."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.embedding.note import Note, finite_vectors, unit_vectors
from declutr.encoders.protocol import unit_rows
from declutr.trainer.data.plan import permute

PLANE_ROWS = 5_000  # so that a map takes seconds
"""Texts that fit the plane; all are placed on it."""
SHARE = b"share of the variance"
"""Key of the file's metadata: the share of the variance within the plane, in [0, 1]."""
_LEAST_SHARE = 1e-12  # of the largest eigenvalue


def rows_of(chunks: Iterator[NDArray[Any]], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Vectors `(len(rows), size)` of ascending rows."""
    parts, start = [], 0
    for chunk in chunks:  # a batch of Parquet may be shorter than the others, so rows are counted
        parts.append(chunk[rows[(rows >= start) & (rows < start + len(chunk))] - start])
        start += len(chunk)
    return np.concatenate(parts)


@dataclass(frozen=True)
class Plane:
    """The plane in which embeddings differ most: their first two principal components (Pearson, 1901).

    With mean m and covariance C = 1/n sum_i (x_i - m)(x_i - m)^T, a vector x of length 1 is placed at
    (u_1, u_2)^T (x - m), where u_1 and u_2 are the eigenvectors of C with the largest eigenvalues. Unlike the places of
    UMAP or t-SNE, these depend on no random start, and each follows from its vector alone, so that batches are placed
    one after the other.
    """

    mean: NDArray[np.float64]
    """`(size,)`."""
    axes: NDArray[np.float64]
    """`(size, 2)`, of length 1; the second is null if the embeddings lie on a line."""
    share: float
    """Share of the variance within the plane, in [0, 1]; 1 if there is no variance."""

    def place(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Coordinates `(n, 2)` of vectors `(n, size)`."""
        return ((vectors - self.mean) @ self.axes).astype(np.float32)


def fit_plane(vectors: NDArray[np.float32]) -> Plane:
    """Fit the plane of vectors `(n, size)`, n and size at least 1. Their order affects rounding only."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    _, singular, directions = np.linalg.svd(vectors - mean, full_matrices=False)
    variances, axes = singular**2, np.zeros((vectors.shape[1], 2))
    real = variances[:2] > _LEAST_SHARE * variances[0]  # others are rounding
    axes[:, : len(real)] = directions[:2].T * real
    # The sign of an eigenvector is arbitrary: make the number of largest magnitude positive.
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    total = float(variances.sum())
    return Plane(mean, axes, min(1.0, float(variances[:2].sum()) / total) if total else 1.0)


def sample_rows(num_rows: int) -> NDArray[np.int64]:
    """Ascending numbers below `num_rows`: `PLANE_ROWS` of them, always the same ones, or all if there are fewer."""
    drawn = np.arange(min(num_rows, PLANE_ROWS))
    if num_rows > PLANE_ROWS:
        drawn = np.sort(permute(seeding.key_for(0, "map"), np.zeros_like(drawn), drawn, num_rows))
    return drawn


def write_map(path: Path, texts: Path, embeddings: Path, note: Note) -> None:
    """Write the map of a file of at least one embedding for Embedding Atlas, a batch at a time.

    Columns: text, id, source, vector (as in the file of embeddings, of its type), x, y (float32).

    Args:
        path: file to write.
        texts: `texts.arrow` of the index, with a row for each embedding.
        embeddings: file of `declutr embed`.
        note: its note.
    """
    plane = fit_plane(rows_of(unit_vectors(embeddings, note), sample_rows(note.rows)))
    with pa.memory_map(str(texts)) as source:
        table = pa.ipc.open_file(source).read_all()  # mapped, so nothing is read yet
        vector = pa.list_(pa.from_numpy_dtype(note.config.shape.dtype), note.size)
        fields = [*(table.schema.field(name) for name in ("text", "id", "source")), pa.field("vector", vector)]
        schema = pa.schema([*fields, ("x", pa.float32()), ("y", pa.float32())], {SHARE: str(round(plane.share, 6))})
        start = 0
        with pq.ParquetWriter(path, schema) as writer:
            for chunk in finite_vectors(embeddings, note):
                x, y = plane.place(unit_rows(chunk.astype(np.float32))).T
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(chunk)), note.size)
                columns = table.slice(start, len(chunk)).select(["text", "id", "source"]).columns
                writer.write_table(pa.Table.from_arrays([*columns, vectors, pa.array(x), pa.array(y)], schema=schema))
                start += len(chunk)
