"""A task's data as plain values (sentences, labels, splits), what was found in them, and errors for unreadable ones.

Legend: R rows of a split, I images, D features of an image.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.senteval.data.tasks import SentEvalTask

EMPTY = "."
"""Replacement for a line without words: SentEval's examples and DeCLUTR's script embed a full stop for it."""


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
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all splits."""
        return sum(len(split) for split in self.splits.values())


def without_train(data: TaskData) -> TaskData:
    """The task without its training pairs, which a cosine does not need."""
    return replace(data, splits={name: split for name, split in data.splits.items() if name != "train"})


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


Standing = Literal["identical", "unverified", "unpublished", "refused", "missing"]
MARKS: Mapping[Standing, str] = {
    "unverified": "no hash of the published files is known; comparable with no published number",
    "unpublished": "not the published data; comparable with no published number",
}
"""Reason for the mark on a score, by its data's standing."""


@dataclass(frozen=True)
class Inspection:
    """Data of a task and how far they can be trusted."""

    task: SentEvalTask
    standing: Standing
    """identical: every file equals the published one byte for byte. unverified: no hash of the published files is
    known, and the numbers of rows match. unpublished: a file or a number differs, and the user accepted that. refused.
    missing: the files do not exist. Only scores of identical data carry no mark."""
    findings: tuple[str, ...]
    """What is wrong with them or to be known of them, worst first."""
    data: TaskData | None = None
    """Data of the task, None if missing or unreadable. Refused data are included for inspection."""

    @property
    def usable(self) -> bool:
        """Return whether a score may be computed."""
        return self.standing in ("identical", *MARKS)

    @property
    def reason(self) -> str:
        """Reason for a missing score, in one line; "" if a score may be computed."""
        if self.usable:
            return ""
        return "; ".join(self.findings)
