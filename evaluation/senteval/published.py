"""What the published data hold: rows, classes, label sequences and git hashes, from `published.json`.

The JSON says under "basis" where its figures come from. A digest of labels is over the labels in file order, so it does
not change with the tokenisation, the line ends or the encoding of the sentences.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

import numpy as np

from common.config import Strict
from evaluation.senteval.data import Split, TaskData


class PublishedSplit(Strict):
    """Figures of one split or subset."""

    rows: int
    """Scored rows."""
    tolerance: int = 0
    """How far the number of rows may be off where only a rounded figure is published."""
    unscored: int = 0
    """Rows without a gold score."""
    classes: Mapping[str, int] = {}
    """Rows of each class, by name; empty where unknown or where labels are scores."""
    labels: str = ""
    """Digest of the label sequence, or "" where the files were not at hand."""


class Published(Strict):
    """Figures of one task."""

    basis: str
    """A key of `bases()`."""
    splits: Mapping[str, PublishedSplit]
    num_classes: int = 0
    """Classes that must occur in train; 0 where labels are scores."""
    class_names: tuple[str, ...] = ()
    """Their names, where only they are known and not how often each occurs."""
    files: Mapping[str, str] = {}
    """Git's SHA-1 of the published files, as far as known."""
    replacements: int = 0
    """U+FFFD characters that the published sentences hold themselves."""


class _Document(Strict):
    basis: Mapping[str, str]
    tasks: Mapping[str, Published]


def published() -> Mapping[str, Published]:
    """The figures of every task, by name."""
    return _document().tasks


def bases() -> Mapping[str, str]:
    """Where the figures come from, in words."""
    return _document().basis


def label_names(data: TaskData, split: Split) -> list[str]:
    """Labels in file order: class names, or scores as Python writes them."""
    labels = np.empty_like(split.labels)
    labels[split.order] = split.labels
    return [data.classes[int(label)] if data.classes else repr(float(label)) for label in labels]


def label_digest(names: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the names, one a line."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


@cache
def _document() -> _Document:
    return _Document.model_validate_json(files("evaluation.senteval").joinpath("published.json").read_bytes())
