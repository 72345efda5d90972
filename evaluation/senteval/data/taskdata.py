"""A task's data as plain values (sentences, labels, splits), and errors for data that cannot be read.

Legend: R rows of a split, I images, D features of an image.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.senteval.data.tasks import SentEvalTask

EMPTY = "."
"""Replacement for a line without words: SentEval's examples and DeCLUTR's script embed a full stop for it."""


class DataError(ValueError):
    """Data that SentEval's loader would not read; `faked` is the false score that they would give, or ""."""

    def __init__(self, message: str, faked: str = "") -> None:
        super().__init__(message)
        self.faked = faked


class MissingDataError(DataError):
    """The task has no data files."""


@dataclass(frozen=True)
class Split:
    """Rows of one split, or of one subset of an STS task, in the order SentEval gives them to its classifiers."""

    first: tuple[str, ...]
    """R first sentences, words joined by one space."""
    second: tuple[str, ...] | None
    """R second sentences, or None if a row is one sentence."""
    labels: NDArray[np.int64] | NDArray[np.float64]
    """`(R,)`; int64 classes from 0, or float64 gold scores. Retrieval: `(R,)` index of the caption's image."""
    order: NDArray[np.int64]
    """`(R,)` int64; row i is the `order[i]`-th scored row of the files."""
    unscored: tuple[tuple[int, str, str], ...] = ()
    """Rows of the files without a gold score, which are left out: place among all rows of the file from 0, and both
    sentences."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_unscored(self) -> int:
        """Rows of the files without a gold score."""
        return len(self.unscored)


@dataclass(frozen=True)
class TaskData:
    """All data of a task."""

    task: SentEvalTask
    splits: Mapping[str, Split]
    """Parts: "all" for inner_kfold; "train", "test" for kfold; "train", "dev", "test"; an STS task's subsets;
    "dev", "test" for cosine."""
    classes: tuple[str, ...]
    """Name of each class, by its number; empty for gold scores."""
    files: Mapping[str, str]
    """Files read, relative to the data folder, with git's SHA-1 of each."""
    features: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """`(I, D)` float32 image features by split (retrieval alone)."""
    num_empty: int = 0
    """Lines without a word; `EMPTY` replaces them."""
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all splits."""
        return sum(len(split) for split in self.splits.values())


def sentences(data: TaskData) -> tuple[str, ...]:
    """Each distinct sentence of the task once, in order of first appearance."""
    return tuple(sentence_rows([data]))


def sentence_rows(tasks: Iterable[TaskData]) -> dict[str, int]:
    """Map each distinct sentence of all tasks to a row number, so that each is embedded once."""
    rows: dict[str, int] = {}
    for data in tasks:
        for split in data.splits.values():
            for text in (*split.first, *(split.second or ())):
                rows.setdefault(text, len(rows))
    return rows
