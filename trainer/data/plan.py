"""The order of the training stream: plain arithmetic on (seed, sizes), without state, Ray or torch.

Index i = step * batch_documents + position; its epoch is i // num_documents; its document is a keyed permutation of
i mod num_documents. Every document occurs exactly once an epoch, and any step can be computed without the earlier ones.
Ranks take consecutive slices of a batch's positions, so the global batch is the same for every world size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding

_ROUNDS = 8

I64 = NDArray[np.int64]


def permute(seed: int, epochs: I64, items: I64, size: int, inverse: bool = False) -> I64:
    """Image of each item under the keyed permutation of `range(size)` that belongs to its epoch, or its preimage.

    A balanced Feistel network over the next even power of two, with Philox as its round function; values outside the
    range walk the cycle until they are inside (Black and Rogaway, CT-RSA 2002). It needs no table.

    Args:
        seed: the run's seed.
        epochs: `(n,)` epoch of each item.
        items: `(n,)` numbers below `size`.
        size: number of documents, 1 to 2**62.
        inverse: finds the items whose images are `items`.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    values, result = items.astype(np.uint64), np.empty(len(items), np.int64)
    pending, epoch = np.arange(len(items)), epochs.astype(np.uint64)

    def drawn(turn: int, keyed: seeding.U64) -> seeding.U64:
        words = seeding.blocks(seed, "order", keyed, epoch, np.full_like(keyed, turn))[:, 0]
        masked: seeding.U64 = words.astype(np.uint64) & mask
        return masked

    while len(pending):
        left, right = values >> shift, values & mask
        for turn in range(_ROUNDS):
            if inverse:
                left, right = right ^ drawn(_ROUNDS - 1 - turn, left), left
            else:
                left, right = right, left ^ drawn(turn, right)
        values = (left << shift) | right
        inside = values < np.uint64(size)
        result[pending[inside]] = values[inside].astype(np.int64)
        pending, values, epoch = pending[~inside], values[~inside], epoch[~inside]
    return result


@dataclass(frozen=True)
class Plan:
    """The documents that each step of a run reads.

    Attributes:
        seed: the run's seed.
        num_documents: documents of the training split, the length of an epoch.
        batch_documents: documents of one optimizer step over all ranks.
        canonical_documents: documents of a canonical microbatch, of which ranks have whole ones; None: there are none.
    """

    seed: int
    num_documents: int
    batch_documents: int
    canonical_documents: int | None = None

    def slice(self, rank: int, world_size: int) -> tuple[int, int]:
        """Positions [start, end) of a batch that a rank reads; sizes differ by at most one document or microbatch."""
        unit = self.canonical_documents or 1
        units = -(-self.batch_documents // unit)
        start, end = unit * (units * rank // world_size), unit * (units * (rank + 1) // world_size)
        return min(start, self.batch_documents), min(end, self.batch_documents)

    def documents(self, first_step: int, last_step: int, start: int = 0, end: int | None = None) -> tuple[I64, I64]:
        """Epochs and document numbers of positions [start, end) of the steps [first_step, last_step), in order."""
        end = self.batch_documents if end is None else end
        steps = np.arange(first_step, last_step, dtype=np.int64)[:, None]
        index = (steps * self.batch_documents + np.arange(start, end, dtype=np.int64)).reshape(-1)
        epochs = index // self.num_documents
        return epochs, permute(self.seed, epochs, index % self.num_documents, self.num_documents)

    def reads_of(self, document: int, last_step: int) -> tuple[I64, I64, I64]:
        """Epochs, 1-based steps and positions in their batches at which the first `last_step` steps read a document."""
        epochs = np.arange(-(-last_step * self.batch_documents // self.num_documents), dtype=np.int64)
        items = np.full_like(epochs, document)
        index = epochs * self.num_documents + permute(self.seed, epochs, items, self.num_documents, inverse=True)
        read = index < last_step * self.batch_documents
        return epochs[read], index[read] // self.batch_documents + 1, index[read] % self.batch_documents

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps that read `epochs` times the corpus; the last one may run into the next epoch."""
        return max(1, -(-int(epochs * self.num_documents) // self.batch_documents))
