"""Feature tables that classifiers read rows of: embeddings, or features of pairs computed on reading.

[|a-b|, a*b] of MRPC and SICK and [a, b, a*b, |a-b|] of SNLI are two and four times as wide as their embeddings.

The random draws are those of SentEval, whose code reseeds the global generators with 1111 for every fit and takes its
folds from scikit-learn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_BLOCK_BYTES = 4 * 2**20  # of rows per read: fits a CPU's cache


@dataclass(frozen=True)
class Table:
    """Features of examples."""

    first: Tensor  # `(N, size)` float32, contiguous: embeddings of the examples, or of the first sentences of pairs
    second: Tensor | None = None  # `(N, size)` of the second sentences; None for single sentences
    keep_both: bool = False  # for pairs, put a and b before the products, as SNLI does

    def __len__(self) -> int:
        return len(self.first)

    @property
    def width(self) -> int:
        """Number of features."""
        size = self.first.shape[1]
        return size if self.second is None else size * (4 if self.keep_both else 2)


class BlockBuffer:
    """Memory for the rows of a block of `num_sets` sets, for `num_rows` of each, which are at least `batch_size`."""

    def __init__(self, features: Table, num_sets: int, batch_size: int) -> None:
        fitting = _BLOCK_BYTES // (4 * features.width)
        self.num_sets = max(1, min(num_sets, fitting // batch_size))
        self.num_rows = max(batch_size, fitting // self.num_sets)
        self._features = features
        self._flat = torch.empty(self.num_sets * self.num_rows * features.width, dtype=torch.float32)

    def blocks(self, num_sets: int) -> Iterator[slice]:
        """Slices of the sets, each small enough to fit."""
        return (slice(start, start + self.num_sets) for start in range(0, num_sets, self.num_sets))

    def take(self, rows: Tensor) -> Tensor:
        """Features of rows (S, B), `(S, B, width)`, which the next call overwrites."""
        features, flat = self._features, rows.reshape(-1)
        out = self._flat[: len(flat) * features.width].view(len(flat), features.width)
        if features.second is None:
            torch.index_select(features.first, 0, flat, out=out)
        else:  # by batch, which stays in the cache: SNLI's 550,000 pairs would take 6.8 GB
            first, second = features.first.index_select(0, flat), features.second.index_select(0, flat)
            parts = out.unflatten(1, (-1, first.shape[1])).unbind(1)
            if features.keep_both:
                parts[0].copy_(first)
                parts[1].copy_(second)
                torch.mul(first, second, out=parts[2])
                torch.sub(first, second, out=parts[3]).abs_()
            else:
                torch.mul(first, second, out=parts[1])
                torch.sub(first, second, out=parts[0]).abs_()
        return out.view(*rows.shape, features.width)


def table(first: ArrayLike, second: ArrayLike | None = None, keep_both: bool = False) -> Table:
    """Table of `(N, size)` embeddings, or of pairs: [|a-b|, a*b], or [a, b, a*b, |a-b|] with `keep_both`."""
    # copies what is not writable, of which torch warns
    sides = [
        torch.from_numpy(np.require(side, np.float32, ["C", "W", "E"])) for side in (first, second) if side is not None
    ]
    return Table(sides[0], sides[1] if len(sides) > 1 else None, keep_both)


Rows = NDArray[np.int64]

HELD_OUT = 0.05  # share of a training set that stops a refit if the task has no dev set
_FOLD_SEED = 1111  # seed of InnerKFold's folds, whatever the configured seed


@dataclass(frozen=True)
class TrainingSet:
    """Rows of one or several fits that differ only in their regularisation."""

    train: Rows  # row numbers of the training table; their order matters, because permutations are of positions
    dev: Rows  # row numbers of the dev table (the training table if the set is a fold)
    num_drawn: int = 0  # length of the permutation drawn from the fit's stream before training; 0 for none

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.dev):
            raise ValueError(
                f"a classifier needs rows to learn from and rows to stop by, found {len(self.train)} and "
                f"{len(self.dev)}; a refit holds out {HELD_OUT:.0%}, which needs at least 20 rows"
            )

    @property
    def stream(self) -> tuple[int, int]:
        """Key of the random stream; sets of one stream see their positions in the same orders."""
        return self.num_drawn, len(self.train)


def stratified_folds(labels: ArrayLike, num_folds: int, seed: int = _FOLD_SEED) -> list[tuple[Rows, Rows]]:
    """Row numbers `(train, test)` of each fold, equal to `sklearn.model_selection.StratifiedKFold(shuffle=True)`.

    Each class is dealt out over the folds in the shares found at every num_folds-th place of the sorted labels. The
    deal of each class is then shuffled, classes in order of first appearance.
    """
    values, first, inverse = np.unique(np.asarray(labels), return_index=True, return_inverse=True)
    num_classes = len(values)
    by_appearance = np.empty(num_classes, np.int64)
    by_appearance[np.argsort(first)] = np.arange(num_classes)
    codes = by_appearance[inverse]
    largest = int(np.bincount(codes).max()) if len(codes) else 0
    if num_folds < 2 or largest < num_folds:
        raise ValueError(
            f"num_folds = {num_folds} must be at least 2 and at most {largest}, the rows of the largest class"
        )
    ordered = np.sort(codes)
    shares = np.stack([np.bincount(ordered[fold::num_folds], minlength=num_classes) for fold in range(num_folds)])
    stream = np.random.RandomState(seed)  # draws as the global one of that seed, and nobody else draws from it
    fold_of = np.empty(len(codes), np.int64)
    for code in range(num_classes):
        deal = np.arange(num_folds).repeat(shares[:, code])
        stream.shuffle(deal)
        fold_of[codes == code] = deal
    return [(np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)) for fold in range(num_folds)]


def hold_out(rows: Rows, seed: int) -> TrainingSet:
    """Split `rows` at random: 5% (rounded down) stop the fit, the others train it."""
    drawn = np.random.RandomState(seed).permutation(len(rows))
    num_dev = int(HELD_OUT * len(rows))
    return TrainingSet(rows[drawn[num_dev:]], rows[drawn[:num_dev]], num_drawn=len(rows))


def orders(seed: int, num_drawn: int, num_rows: int) -> Iterator[Rows]:
    """Endless permutations of `num_rows` positions, one per pass."""
    stream = np.random.RandomState(seed)
    if num_drawn:
        stream.permutation(num_drawn)  # that of `hold_out`, which the official fit draws from the same generator
    while True:
        yield stream.permutation(num_rows)
