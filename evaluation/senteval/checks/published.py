"""Figures of the published data, from `published.json`: rows, classes, digests of all rows and git hashes.

"basis" in the JSON gives the source of its figures. The digests of rows (`rows.py`) were computed from files with the
hashes under "files".
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from declutr.common.config import Strict
from declutr.evaluation.senteval.checks.digests import Digests


class PublishedSplit(Strict):
    """Figures of one split or subset."""

    rows: int
    """Scored rows."""
    tolerance: int = 0
    """Allowed difference in the number of rows if only a rounded figure is published."""
    unscored: int = 0
    """Rows without a gold score."""
    classes: Mapping[str, int] = {}
    """Rows of each class, by name; empty where unknown or where labels are scores."""
    digests: Digests | None = None
    """Digests of all rows, scored or not; None if the files were not available."""


class Published(Strict):
    """Figures of one task."""

    basis: str
    """Key of "basis" in the JSON."""
    splits: Mapping[str, PublishedSplit]
    num_classes: int = 0
    """Classes that must occur in train; 0 where labels are scores."""
    class_names: tuple[str, ...] = ()
    """Class names, if only the names are known and not the rows of each."""
    files: Mapping[str, str] = {}
    """Git's SHA-1 of the published files, if known."""
    replacements: int = 0
    """U+FFFD characters in the published sentences themselves."""


class _Document(Strict):
    basis: Mapping[str, str]
    tasks: Mapping[str, Published]


@cache
def published() -> Mapping[str, Published]:
    """Figures of every task, by name."""
    content = files(__package__).joinpath("published.json").read_bytes()
    return _Document.model_validate_json(content).tasks
