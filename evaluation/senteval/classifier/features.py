"""Feature tables that classifiers read rows of: embeddings, or features of pairs computed on reading.

[|a-b|, a*b] of MRPC and SICK and [a, b, a*b, |a-b|] of SNLI are two and four times as wide as their embeddings.
Computed per batch they stay in the processor's cache, and SNLI's 550,000 pairs never take their 6.8 GB.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

_BLOCK_BYTES = 4 * 2**20  # of rows per read: fits a CPU's cache


@dataclass(frozen=True)
class Table:
    """Features of examples."""

    first: Tensor
    """`(N, size)` float32, contiguous: embeddings of the examples, or of the first sentences of pairs."""
    second: Tensor | None = None
    """`(N, size)` of the second sentences; None for single sentences."""
    keep_both: bool = False
    """For pairs, put a and b before the products, as SNLI does."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def width(self) -> int:
        """Number of features."""
        size = self.first.shape[1]
        return size if self.second is None else size * (4 if self.keep_both else 2)

    def buffer(self, num_rows: int) -> Tensor:
        """Flat memory for the features of `num_rows` rows."""
        return torch.empty(num_rows * self.width, dtype=torch.float32)

    def take(self, rows: Tensor, buffer: Tensor) -> Tensor:
        """Features of `rows` (any shape), `(*rows.shape, width)`, written into the flat `buffer` of `buffer`."""
        flat = rows.reshape(-1)
        taken = buffer[: len(flat) * self.width].view(len(flat), self.width)
        if self.second is None:
            torch.index_select(self.first, 0, flat, out=taken)
        else:
            first, second = self.first.index_select(0, flat), self.second.index_select(0, flat)
            parts = taken.unflatten(1, (-1, first.shape[1])).unbind(1)
            if self.keep_both:
                parts[0].copy_(first)
                parts[1].copy_(second)
                torch.mul(first, second, out=parts[2])
                torch.sub(first, second, out=parts[3]).abs_()
            else:
                torch.mul(first, second, out=parts[1])
                torch.sub(first, second, out=parts[0]).abs_()
        return taken.view(*rows.shape, self.width)


class BlockBuffer:
    """Memory for the rows of a block of sets, at least `batch_size` of each set.

    Attributes:
        num_sets: sets per block.
        num_rows: rows of each set that fit.
    """

    def __init__(self, features: Table, num_sets: int, batch_size: int) -> None:
        fitting = _BLOCK_BYTES // (4 * features.width)
        self.num_sets = max(1, min(num_sets, fitting // batch_size))
        self.num_rows = max(batch_size, fitting // self.num_sets)
        self._features, self._flat = features, features.buffer(self.num_sets * self.num_rows)

    def blocks(self, num_sets: int) -> Iterator[slice]:
        """Slices of the sets, each small enough to fit."""
        return (slice(start, start + self.num_sets) for start in range(0, num_sets, self.num_sets))

    def take(self, rows: Tensor) -> Tensor:
        """Features of rows (S, B)."""
        return self._features.take(rows, self._flat)


def table(embeddings: ArrayLike) -> Table:
    """Table of single sentences: `(N, size)` embeddings as they are.

    Raises:
        ValueError: not a matrix, or a value that is not finite.
    """
    return Table(_matrix(embeddings))


def pair_table(first: ArrayLike, second: ArrayLike, keep_both: bool = False) -> Table:
    """Table of sentence pairs: [|a-b|, a*b], or [a, b, a*b, |a-b|] with `keep_both`.

    Raises:
        ValueError: not two matrices of one shape, or a value that is not finite.
    """
    a, b = _matrix(first), _matrix(second)
    if a.shape != b.shape:
        raise ValueError(f"embeddings of pairs must have one shape, found {tuple(a.shape)} and {tuple(b.shape)}")
    return Table(a, b, keep_both)


def _matrix(embeddings: ArrayLike) -> Tensor:
    array = np.ascontiguousarray(embeddings, np.float32)
    if array.ndim != 2:
        raise ValueError(f"embeddings must be (rows, size), found shape {array.shape}")
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).any(axis=1).sum())
        raise ValueError(f"{bad} of {len(array)} embeddings have values that are not finite")
    if not array.flags.writeable:
        array = array.copy()  # torch warns about memory that is not writable
    return torch.from_numpy(array)
