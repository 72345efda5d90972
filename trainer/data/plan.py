"""The order of the training stream: plain arithmetic on (seed, sizes), without state, Ray or torch.

Index i = step * batch_documents + position; its epoch is i // num_documents; its document is a keyed permutation of
i mod num_documents. Every document occurs exactly once an epoch, and any step can be computed without the earlier ones.
Ranks take consecutive slices of a batch's positions, so the global batch is the same for every world size.

Several corpora take turns. Each has its own order and its own epochs: row k of a corpus is in its epoch k // documents.
Their documents are numbered one after the other. The order of the corpora repeats after as many rows as the shares add
up to, and shares are exact to less than one row at any position: within a period, row k of a corpus with the share w is
due between the positions floor((k - 1) / w) and ceil(k / w), and of the rows that are due the one with the earliest end
is read (earliest deadline first; Baruah and others, Algorithmica 1996: such an order exists, and after every N rows a
corpus was read less than one row more or less than w N times).
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding

MOST_TURNS = 100_000  # longest period in rows: its table is held in memory by every process that reads


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of positive weights, read as the decimals in which they are written."""
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth, which no float is
    scaled = [int(fraction * math.lcm(*(other.denominator for other in exact))) for fraction in exact]
    divisor = math.gcd(*scaled)
    return tuple(share // divisor for share in scaled)


@lru_cache
def turns(shares: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`(period,)` corpus that each position of a period reads, and how many of its rows were read before in it."""
    period = sum(shares)
    read = [0] * len(shares)
    later = [(0, corpus) for corpus in range(len(shares))]
    due = list[tuple[int, int]]()
    corpora, places = np.empty(period, np.int64), np.empty(period, np.int64)
    for position in range(period):
        while later and later[0][0] <= position:
            corpus = heapq.heappop(later)[1]
            heapq.heappush(due, (-(-(read[corpus] + 1) * period // shares[corpus]), corpus))  # its next deadline
        corpus = heapq.heappop(due)[1]
        corpora[position], places[position] = corpus, read[corpus]
        read[corpus] += 1
        if read[corpus] < shares[corpus]:
            heapq.heappush(later, (read[corpus] * period // shares[corpus], corpus))
    return corpora, places


_ROUNDS = 8

I64 = NDArray[np.int64]


def permute(
    seed: int,  # the run's seed
    epochs: I64,  # `(n,)` epoch of each item
    items: I64,  # `(n,)` numbers below `size`
    size: int,  # number of documents, 1 to 2**62
    inverse: bool = False,  # finds the items whose images are `items`
) -> I64:
    """Image of each item under the keyed permutation of `range(size)` that belongs to its epoch, or its preimage.

    A balanced Feistel network over the next even power of two, with Philox as its round function; values outside the
    range walk the cycle until they are inside (Black and Rogaway, CT-RSA 2002). It needs no table.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    values, result = items.astype(np.uint64), np.empty(len(items), np.int64)
    pending, epoch = np.arange(len(items)), epochs.astype(np.uint64)

    def drawn(turn: int, keyed: seeding.U64) -> seeding.U64:
        return seeding.blocks(seed, "order", keyed, epoch, np.full_like(keyed, turn))[:, 0].astype(np.uint64) & mask

    while len(pending):  # at most 4 times as many values as items, so few rounds
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


def part_of(total: int, unit: int, rank: int, size: int) -> tuple[int, int]:
    """The rank's part [start, end) of `total` rows, in whole units but for the last; parts differ by a unit at most."""
    units = -(-total // unit)
    start, end = unit * (units * rank // size), unit * (units * (rank + 1) // size)
    return min(start, total), min(end, total)


@dataclass(frozen=True)
class Plan:
    """The documents that each step of a run reads."""

    seed: int  # the run's seed
    num_documents: int  # documents of the training split, the length of an epoch; of several corpora their sum
    batch_documents: int  # documents of one optimizer step over all ranks
    # documents of a canonical microbatch, of which ranks have whole ones; None: there are none.
    canonical_documents: int | None = None
    sizes: tuple[int, ...] = ()  # documents of each of several corpora; empty: there is one
    shares: tuple[int, ...] = (1,)  # share of each in the rows that are read, as whole numbers without a common divisor

    def slice(self, rank: int, world_size: int) -> tuple[int, int]:
        """Positions [start, end) of a batch that a rank reads; sizes differ by at most one document or microbatch."""
        return part_of(self.batch_documents, self.canonical_documents or 1, rank, world_size)

    def documents(self, first_step: int, last_step: int, start: int = 0, end: int | None = None) -> tuple[I64, I64]:
        """Epochs and document numbers of positions [start, end) of the steps [first_step, last_step), in order."""
        end = self.batch_documents if end is None else end
        steps = np.arange(first_step, last_step, dtype=np.int64)[:, None]
        index = (steps * self.batch_documents + np.arange(start, end, dtype=np.int64)).reshape(-1)
        corpora, places = turns(self.shares)
        rounds, turn = index // len(corpora), index % len(corpora)
        epochs, numbers = np.empty_like(index), np.empty_like(index)
        for corpus, (seed, first, size, share) in enumerate(self._corpora()):
            mask = corpora[turn] == corpus
            row = rounds[mask] * share + places[turn[mask]]
            epochs[mask] = row // size
            numbers[mask] = first + permute(seed, row // size, row % size, size)
        return epochs, numbers

    def reads_of(self, document: int, last_step: int) -> tuple[I64, I64, I64]:
        """Epochs, 1-based steps and positions in their batches at which the first `last_step` steps read a document."""
        corpus, number = self.place_of(document)
        seed, _, size, share = self._corpora()[corpus]
        epochs = np.arange(-(-self.rows_read(last_step)[corpus] // size), dtype=np.int64)
        row = epochs * size + permute(seed, epochs, np.full_like(epochs, number), size, inverse=True)
        period, own = sum(self.shares), np.flatnonzero(turns(self.shares)[0] == corpus)
        index = row // share * period + own[row % share]
        read = index < last_step * self.batch_documents
        return epochs[read], index[read] // self.batch_documents + 1, index[read] % self.batch_documents

    def rows_read(self, last_step: int) -> list[int]:
        """Rows of each corpus that the first `last_step` steps read."""
        corpora, _ = turns(self.shares)
        rounds, rest = divmod(last_step * self.batch_documents, len(corpora))
        begun = np.bincount(corpora[:rest], minlength=len(self.shares)).tolist()  # of the period that has begun
        return [rounds * share + more for share, more in zip(self.shares, begun, strict=True)]

    def most_in_batch(self) -> list[int]:
        """Most rows of each corpus that a batch can hold, or one more."""
        size, period = self.batch_documents, sum(self.shares)
        return [min(size, -(-size * share // period) + 1) for share in self.shares]

    def place_of(self, document: int) -> tuple[int, int]:
        """Corpus of a document, and its number there."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        corpus = int(np.searchsorted(starts, document, side="right")) - 1
        return corpus, document - int(starts[corpus])

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps that read `epochs` times as many rows as there are; the last may run into the next epoch."""
        return max(1, -(-int(epochs * self.num_documents) // self.batch_documents))

    def _corpora(self) -> list[tuple[int, int, int, int]]:
        """Seed, first number, size and share of each corpus; the first has the seed of the run."""
        corpora, first = list[tuple[int, int, int, int]](), 0
        for corpus, (size, share) in enumerate(zip(self.sizes or (self.num_documents,), self.shares, strict=True)):
            seed = seeding.torch_seed(self.seed, "corpus", corpus) if corpus else self.seed  # else equal orders
            corpora.append((seed, first, size, share))
            first += size
        return corpora


def rows_by_corpus(plans: Mapping[str, Plan], step: int) -> dict[str, float | None]:
    """Rows of each corpus in a 1-based step by the names of its metrics; nothing of a task with a single corpus."""
    return {
        f"{f'{task}_' if task else ''}corpus_{number}_rows": after - before
        for task, plan in plans.items()
        if plan.sizes
        for number, (before, after) in enumerate(zip(plan.rows_read(step - 1), plan.rows_read(step), strict=True), 1)
    }
