"""A user's retrieval test: queries, each with its text or the id of a document."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from declutr.common import seeding
from declutr.common.console.terminal import excerpt, shorten
from declutr.common.errors import DataError, suggest
from declutr.common.storage import hash_json

MOST_BYTES = 2**30  # largest file of pairs or documents, because both are held in memory
_CSV = (".csv", ".tsv")
_LINES = "write one JSON object a line, or a .csv or .tsv, not compressed"
_MOST_NAMED, _MOST_CHARACTERS = 5, 80
Part = Literal["development", "test", "train"]


@dataclass(frozen=True)
class RetrievalTest:
    """Queries and the texts among which their answers are searched."""

    queries: list[str]  # Q distinct queries, in the order of the file
    texts: list[str]  # G distinct texts
    relevant: list[list[int]]  # for each query the numbers of its texts, ascending
    # for each query the smallest text or id that the file pairs with it; halves need them.
    targets: list[str] = field(default_factory=list)

    @cached_property
    def answers(self) -> NDArray[np.int64]:
        """`(Q,)` number of each query's answers: queries with a text in common, also through others, have one number.

        They are what is independent: three wordings of a question are right or wrong together, and so are queries and
        texts that differ in case and whitespace alone.
        """
        pairs = np.array([(query, text) for query, texts in enumerate(self.relevant) for text in texts], np.int64)
        pairs = pairs.reshape(-1, 2)
        number, size = len(self.queries), len(self.queries) + int(pairs[:, 1].max(initial=-1)) + 1
        queries, texts = _alike(self.queries), number + (_alike(self.texts) if self.texts else np.arange(size - number))
        edges = coo_array((np.ones(len(pairs)), (queries[pairs[:, 0]], texts[pairs[:, 1]])), shape=(size, size))
        components = connected_components(edges, directed=False)[1][queries]
        return np.unique(components, return_inverse=True)[1]  # without those of texts alone

    @property
    def num_answers(self) -> int:
        """Number of different answers."""
        return int(self.answers.max(initial=-1)) + 1

    def part(self, which: Part, seed: int, train: bool = False) -> "RetrievalTest":
        """The queries that choose (development), that report (test), or, of thirds, that are trained on."""
        places = self.places(which, seed, train).tolist()
        queries, relevant = [self.queries[place] for place in places], [self.relevant[place] for place in places]
        return RetrievalTest(queries, self.texts, relevant, [self.targets[place] for place in places])

    def places(self, which: Part, seed: int, train: bool = False) -> NDArray[np.int64]:
        """Numbers of queries of a half, or third if some `train`, by a draw for their answers, never in two parts."""
        smallest = dict[int, str]()
        for answer, target in zip(self.answers.tolist(), self.targets, strict=True):
            smallest[answer] = min(smallest.get(answer, target), target)
        # a hash of a text, so that answers stay in their half when others are added
        drawn_keys = {answer: int(hash_json(target)[:16], 16) for answer, target in smallest.items()}
        keys = np.array([drawn_keys[answer] for answer in self.answers.tolist()], np.uint64)
        drawn = seeding.unit(seeding.words(seed, "adaptation pairs", keys, np.zeros_like(keys), 1))[:, 0]
        # Training first: the half that reports, in `index --pairs`, has no query on which `adapt` trained.
        parts = ("train", "development", "test")[not train :]
        return np.flatnonzero((drawn * len(parts)).astype(np.int64) == parts.index(which))


def _alike(texts: Sequence[str]) -> NDArray[np.int64]:
    """`(N,)` place of the first text that is the same but for case and whitespace."""
    first = dict[str, int]()
    return np.array([first.setdefault(" ".join(text.casefold().split()), place) for place, text in enumerate(texts)])


def read_test(pairs: Path, documents: Path | None = None, hint: str = "") -> RetrievalTest:
    """Read pairs of `query` and `text`, or of `query` and `id` with the documents that have these ids.

    JSON Lines or CSV (.csv, .tsv) with a header. A query that occurs several times has several relevant texts. All
    documents are searched, also those that no pair names; documents with the same text are one. `hint` ends an
    error about a column.
    """
    rows = read_pairs(pairs, ("text",) if documents is None else ("id",), hint)[0]
    if documents is None:
        texts = list(dict.fromkeys(text for _, _, text in rows))
        number = {text: [place] for place, text in enumerate(texts)}
    else:
        text_numbers, number = dict[str, int](), dict[str, list[int]]()  # equal texts are one, or they would tie
        rows_of_documents = (
            (_text(documents, line, row, "id"), _text(documents, line, row, "text")) for line, row in _rows(documents)
        )
        for name, text in dict.fromkeys(rows_of_documents):  # an id may have several texts, such as its passages
            number.setdefault(name, []).append(text_numbers.setdefault(text, len(text_numbers)))
        texts = list(text_numbers)
    test = join_pairs(pairs, rows, number, texts, str(documents))
    if len(texts) < 2:
        raise DataError(f"--pairs {pairs}: there is one text to search; a retrieval test needs at least two")
    return test


Pair = tuple[int, str, str]  # line, query, and text or id


def read_pairs(pairs: Path, keys: Sequence[str] = ("text", "id"), hint: str = "") -> tuple[list[Pair], str]:
    """Read the pairs of a file, and the first of `keys` that is a column; `hint` ends the error if it has none."""
    rows = list(_rows(pairs))
    if not rows:
        raise DataError(f"--pairs {pairs}: holds no pairs")
    key = next((key for key in keys if key in rows[0][1]), keys[0])
    _check_columns(f"--pairs {pairs}", rows[0][1], ("query", key), hint)
    return [(line, _text(pairs, line, row, "query"), _text(pairs, line, row, key)) for line, row in rows], key


def _check_columns(file: str, row: Mapping[str, Any], columns: Sequence[str], hint: str = "") -> None:
    if missing := [name for name in columns if name not in row]:
        near = "".join(suggest(name, sorted(row)) for name in missing)
        if len(row) == 1 and ";" in next(iter(row)):
            near = "; separate the columns by commas (.csv) or tabs (.tsv)"
        lacks = f"has no column {' and no '.join(missing)}{near}; its columns are {', '.join(sorted(row))}{hint}"
        raise DataError(f"{file}: {lacks}")


def read_passages(path: Path) -> dict[str, list[str]]:
    """Passages by the text of their document, which joins those of the same `document` by blank lines.

    JSON Lines or CSV (.csv, .tsv) with `text` and `document`; the order is that of the file.
    """
    passages = dict[str, list[str]]()
    for line, row in _rows(path):
        if not passages:
            _check_columns(f"--passages {path}", row, ("document", "text"))
        passages.setdefault(_text(path, line, row, "document"), []).append(_text(path, line, row, "text"))
    if not passages:
        raise DataError(f"--passages {path}: holds no passages")
    return {"\n\n".join(texts): texts for texts in passages.values()}


def join_pairs(
    pairs: Path, rows: Sequence[Pair], number: Mapping[str, list[int]], texts: list[str], where: str
) -> RetrievalTest:
    """The test of distinct queries and the relevant texts of each.

    `number` has the numbers of the texts by text or id. The `texts` of `where` may be elsewhere, and are then empty.
    """
    relevant: dict[str, set[int]] = {}
    targets: dict[str, str] = {}
    unknown = []
    for line, query, target in rows:
        if target in number:
            relevant.setdefault(query, set()).update(number[target])
            targets[query] = min(targets.get(query, target), target)
        else:
            unknown.append(f"line {line}: {shorten(target, _MOST_CHARACTERS)}")
    if unknown:
        raise DataError(
            f"--pairs {pairs}: {len(unknown):,} of {len(rows):,} pairs name no document of {where}: "
            f"{excerpt(unknown, _MOST_NAMED)}; a `text` must be a whole one"
        )
    numbers = [sorted(numbers) for numbers in relevant.values()]
    return RetrievalTest(list(relevant), texts, numbers, list(targets.values()))


def _text(path: Path, line: int, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    # ids may be numbers in JSON; True is an int, and no id
    if isinstance(value, int) and not isinstance(value, bool) and name in ("id", "document"):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{path}, line {line}: `{name}` must be a text, not {str(value)[:40]!r}")
    try:
        value.encode()  # no tokenizer takes half of a character
    except UnicodeEncodeError as error:
        raise DataError(f"{path}, line {line}: `{name}` holds half of a character (a lone surrogate)") from error
    return value


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with the numbers of their lines."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is a pipe or a device" if path.exists() else "there is no such file"
        raise DataError(f"{path}: {what}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise DataError(f"{path}: has {size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:  # spreadsheets write a byte order mark
            if path.suffix in _CSV:
                csv.field_size_limit(MOST_BYTES)  # 131,072 characters by itself; readers of corpora set their own
                # strict: else a quote that nothing closes takes the rest of the file as one text
                reader = csv.DictReader(stream, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
                for row in reader:
                    if path.suffix == ".tsv" and any("\t" in cell for cell in row.values() if isinstance(cell, str)):
                        raise DataError(
                            f'{path}, line {reader.line_num}: a " of an earlier line is closed here, over tabs; '
                            'remove it, or write its cell in quotes and "" for "'
                        )
                    if any(cell.strip() for cell in row.pop(None, [])):  # cells beyond those of the first line
                        raise DataError(
                            f"{path}, line {reader.line_num}: more cells than the first line has; put quotes around a "
                            f"text that holds {reader.reader.dialect.delimiter!r}"
                        )
                    yield reader.line_num, row
                return
            for line, text in enumerate(stream, 1):
                if text.strip():
                    try:
                        row = json.loads(text)
                    except json.JSONDecodeError as error:  # whose own line is that of its text
                        raise DataError(f"{path}, line {line}: is not JSON ({error.msg}); {_LINES}") from error
                    if not isinstance(row, dict):
                        raise DataError(f"{path}, line {line}: a {type(row).__name__}, not an object; {_LINES}")
                    yield line, row
    except DataError:
        raise
    except (ValueError, csv.Error, RecursionError) as error:  # not UTF-8, not JSON, or a number of 5,000 digits
        kind, hint = ("CSV", "") if path.suffix in _CSV else ("JSON Lines", f"; {_LINES}")
        raise DataError(f"{path}: is not {kind} in UTF-8 ({error}){hint}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
