"""Rows of a fit and their order: SentEval's random draws, reproduced exactly.

The official code reseeds numpy's and torch's global generators with 1111 for every fit and takes its folds from
scikit-learn. Here every stream has a separate generator: `RandomState(seed)` gives the permutations that
`numpy.random.seed(seed)` would give, and no other code in the process can shift them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]

HELD_OUT = 0.05  # share of a training set that stops a refit if the task has no dev set
_FOLD_SEED = 1111  # seed of InnerKFold's folds, whatever the configured seed


@dataclass(frozen=True)
class TrainingSet:
    """Rows of one or several fits that differ only in their regularisation."""

    train: Rows
    """Row numbers of the training table; their order matters, because permutations are of positions."""
    dev: Rows
    """Row numbers of the dev table (the training table if the set is a fold)."""
    num_drawn: int = 0
    """Length of the permutation drawn from the fit's stream before training; 0 for none."""

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

    Raises:
        ValueError: no class has as many rows as there are folds, or fewer than two folds were requested.
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
    stream = np.random.RandomState(seed)
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
        stream.permutation(num_drawn)
    while True:
        yield stream.permutation(num_rows)
