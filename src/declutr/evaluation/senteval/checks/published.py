"""Figures of the published data, from `published.json`: rows, classes, git hashes, and digests of all rows.

"basis" in the JSON gives the source of its figures. The digests of rows were computed from files with the
hashes under "files".
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files

from declutr.common.config import Strict
from declutr.evaluation.senteval.data.taskdata import Split, TaskData

_WRITTEN_OUT = re.compile(r"-[lr][rcs]b-|& ?(?:amp|lt|gt|quot|apos|#39) ?;")  # signs as some tokenizers write them


class Digests(Strict):
    """Digests of one split or subset. All except `rows` compare sentences by letters and digits alone (`letters`)."""

    rows: str
    """Label and words of every row, scored or not, in file order."""
    gold: str
    """Label of every row in file order; "" for a row without one."""
    first: str
    """Sentences in file order."""
    second: str = ""
    """Second sentences in file order; "" if a row is one sentence."""
    first_sorted: str
    """Sentences, sorted."""
    second_sorted: str = ""
    """Second sentences, sorted."""
    rows_sorted: str
    """Rows with their labels, sorted."""
    distinct: int
    """Number of rows, equal ones counted once."""


def digests_of(data: TaskData, split: Split) -> Digests:
    """Compute the digests of a split's rows."""
    rows = list(file_rows(data, split))
    first, second = [letters(row[1]) for row in rows], [letters(row[2]) for row in rows]
    plain = ["\t".join((row[0], one, two)) for row, one, two in zip(rows, first, second, strict=True)]
    pairs = data.task.pairs
    return Digests(
        rows=digest("\t".join(row) for row in rows),
        gold=digest(row[0] for row in rows),
        first=digest(first),
        second=digest(second) if pairs else "",
        first_sorted=digest(sorted(first)),
        second_sorted=digest(sorted(second)) if pairs else "",
        rows_sorted=digest(sorted(plain)),
        distinct=len(set(plain)),
    )


def same_sentences(found: Digests, known: Digests | None) -> bool:
    """Return whether the sentences are the known ones in the same order, regardless of tokenization."""
    return known is not None and (found.first, found.second) == (known.first, known.second)


def file_rows(data: TaskData, split: Split) -> Iterator[tuple[str, str, str]]:
    """Yield label ("" if none), first and second sentence ("" if none) of each row, in file order."""
    scored: list[tuple[str, str, str]] = [("", "", "")] * len(split)
    second = split.second or ("",) * len(split)
    for place, number, one, two in zip(split.order.tolist(), split.labels.tolist(), split.first, second, strict=True):
        scored[place] = (data.classes[int(number)] if data.classes else repr(float(number)), one, two)
    unscored = {place: (one, two) for place, one, two in split.unscored}
    following = iter(scored)
    for place in range(len(scored) + len(unscored)):
        yield ("", *unscored[place]) if place in unscored else next(following)


def letters(text: str) -> str:
    """Letters and digits of a sentence in lower case: equal for every tokenization."""
    return "".join(character for character in _WRITTEN_OUT.sub(" ", text.lower()) if character.isalnum())


def digest(lines: Iterable[str]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


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
