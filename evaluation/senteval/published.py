"""What the published data hold: rows, classes, label sequences and git hashes, from `published.json`.

The JSON says under "basis" where its figures come from. A digest of labels is over the labels in file order, so it does
not change with the tokenisation, the line ends or the encoding of the sentences.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import numpy as np

from evaluation.senteval.data import Split, TaskData


@dataclass(frozen=True)
class PublishedSplit:
    """Figures of one split or subset.

    Attributes:
        rows: scored rows.
        tolerance: how far the number of rows may be off where only a rounded figure is published.
        unscored: rows without a gold score.
        classes: rows of each class, by name; empty where unknown or where labels are scores.
        labels: digest of the label sequence, or "" where the files were not at hand.
    """

    rows: int
    tolerance: int = 0
    unscored: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    labels: str = ""


@dataclass(frozen=True)
class Published:
    """Figures of one task.

    Attributes:
        basis: a key of `bases()`.
        splits: by name.
        num_classes: classes that must occur in train, 0 where labels are scores.
        files: git's SHA-1 of the published files, as far as known.
        replacements: U+FFFD characters that the published sentences hold themselves.
    """

    basis: str
    splits: Mapping[str, PublishedSplit]
    num_classes: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    replacements: int = 0


@cache
def published() -> Mapping[str, Published]:
    """The figures of every task, by name."""
    return {
        name: Published(**{**entry, "splits": {key: PublishedSplit(**split) for key, split in entry["splits"].items()}})
        for name, entry in _document()["tasks"].items()
    }


def bases() -> Mapping[str, str]:
    """Where the figures come from, in words."""
    return dict(_document()["basis"])


def label_names(data: TaskData, split: Split) -> list[str]:
    """Labels in file order: class names, or scores as Python writes them."""
    labels = np.empty_like(split.labels)
    labels[split.order] = split.labels
    return [data.classes[label] if data.classes else repr(float(label)) for label in labels]


def label_digest(names: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the names, one a line."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


@cache
def _document() -> dict[str, dict[str, dict[str, object]]]:
    return json.loads(files("evaluation.senteval").joinpath("published.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
