"""Nearest neighbours by comparing every vector, stored as float32 or int8."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.embedding.config import VectorType
from declutr.embedding.output import CHUNK_ROWS, mapped, stored_vectors
from declutr.encoders.protocol import unit_rows


class ExactVectors:
    """Mapped vectors `(rows, size)` of an .npy file: float32 of length 1, or int8, of which the direction counts.

    int8 vectors are compared with queries that are not rounded, so a search computes their cosines to float32.

    Raises:
        EmbedError: the file is cut off, altered, or of another shape or type.
    """

    def __init__(self, path: Path, rows: int, size: int, dtype: VectorType) -> None:
        self._is_int8 = dtype == "int8"
        self._vectors = mapped(path, rows, size, dtype) if self._is_int8 else stored_vectors(path, rows, size)

    def __len__(self) -> int:
        return len(self._vectors)

    def cosines(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """`(queries, rows)` cosines of queries `(queries, size)` of length 1."""
        if not self._is_int8:
            found: NDArray[np.float32] = queries @ self._vectors.T
            return found
        found = np.empty((len(queries), len(self)), np.float32)
        for start in range(0, len(self), CHUNK_ROWS):
            some = unit_rows(self._vectors[start : start + CHUNK_ROWS].astype(np.float32))
            found[:, start : start + CHUNK_ROWS] = queries @ some.T
        return found

    def nearest(self, queries: NDArray[np.float32], top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and cosines, each `(queries, top)`, nearest first; `top` is at most the number of rows."""
        scores = self.cosines(queries)
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        return rows, np.take_along_axis(scores, rows, axis=1)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        some = np.asarray(self._vectors[np.asarray(rows, np.int64)])
        return unit_rows(some.astype(np.float32)) if self._is_int8 else some
