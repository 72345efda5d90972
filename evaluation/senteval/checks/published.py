"""What the published data hold: rows, classes, digests of all rows and git hashes, from `published.json`.

The JSON says under "basis" where its figures come from. Digests of rows (`rows.py`) were made of files that have the
hashes under "files".
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from common.config import Strict
from evaluation.senteval.checks.rows import Digests


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
    digests: Digests | None = None
    """Of all rows, scored or not; None where the files were not at hand."""


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


@cache
def _document() -> _Document:
    return _Document.model_validate_json(files("evaluation.senteval.checks").joinpath("published.json").read_bytes())
