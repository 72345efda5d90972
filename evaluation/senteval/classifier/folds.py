"""Which rows a fit trains on, which it is stopped by, and in which order it sees them: SentEval's draws, one by one.

The official code seeds numpy's and torch's global generators anew with 1111 for every fit and takes its folds from
scikit-learn. Here every stream is an object of its own: `RandomState(seed)` gives the permutations that
`numpy.random.seed(seed)` would give, and nothing else in the process can shift them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]

HELD_OUT = 0.05  # part of a training set that stops a refit, where the task has no dev set
_FOLD_SEED = 1111  # InnerKFold's folds take this one, whatever the configured seed


@dataclass(frozen=True)
class TrainingSet:
    """Rows of one or several fits that differ in their regularisation alone.

    Attributes:
        train: row numbers of the training table; their order counts, because permutations are of positions.
        dev: row numbers of the dev table (the same table, where the set is a fold).
        num_drawn: length of the permutation that was drawn from the fit's stream before training, 0 for none.
    """

    train: Rows
    dev: Rows
    num_drawn: int = 0

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.dev):
            raise ValueError(
                f"a classifier needs rows to learn from and rows to be stopped by, found {len(self.train)} and "
                f"{len(self.dev)}; a refit holds out {HELD_OUT:.0%}, which needs 20 rows or more"
            )

    @property
    def stream(self) -> tuple[int, int]:
        """Sets of the same stream see their positions in the same orders."""
        return self.num_drawn, len(self.train)


def stratified_folds(labels: ArrayLike, num_folds: int, seed: int = _FOLD_SEED) -> list[tuple[Rows, Rows]]:
    """Row numbers `(train, test)` of each fold, as `sklearn.model_selection.StratifiedKFold(shuffle=True)` has them.

    Each class is dealt out over the folds in the shares that the sorted labels have at every num_folds-th place, and
    its own deal is shuffled, classes in the order of their first appearance.

    Raises:
        ValueError: no class has as many rows as there are folds, or fewer than two folds.
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
    """Splits `rows` at random: 5 % (rounded down) stop the fit, the others train it."""
    drawn = np.random.RandomState(seed).permutation(len(rows))
    num_dev = int(HELD_OUT * len(rows))
    return TrainingSet(rows[drawn[num_dev:]], rows[drawn[:num_dev]], num_drawn=len(rows))


def orders(seed: int, num_drawn: int, num_rows: int) -> Iterator[Rows]:
    """Permutations of `num_rows` positions, one a pass, without end."""
    stream = np.random.RandomState(seed)
    if num_drawn:
        stream.permutation(num_drawn)
    while True:
        yield stream.permutation(num_rows)
