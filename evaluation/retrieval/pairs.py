"""A user's retrieval test (queries, each with its text or the id of a document), and lexical baselines."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from declutr.common.console.terminal import excerpt
from declutr.common.suggestions import suggest

MOST_BYTES = 2**30
"""Largest file of pairs or documents, because both are held in memory."""
_CSV = (".csv", ".tsv")
_MOST_NAMED = 5


class PairsError(ValueError):
    """A file of pairs or documents that cannot be used."""


@dataclass(frozen=True)
class RetrievalTest:
    """Queries and the texts among which their answers are searched.

    Attributes:
        queries: Q distinct queries, in the order of the file.
        texts: G distinct texts.
        relevant: for each query the numbers of its texts, ascending.
    """

    queries: list[str]
    texts: list[str]
    relevant: list[list[int]]


def read_test(pairs: Path, documents: Path | None = None) -> RetrievalTest:
    """Read pairs of `query` and `text`, or of `query` and `id` with the documents that have these ids.

    JSON Lines or CSV (.csv, .tsv) with a header. A query that occurs several times has several relevant texts. All
    documents are searched, also those that no pair names.

    Raises:
        PairsError: a file is missing, too large or damaged, lacks a column, or a pair names no document.
    """
    rows = list(_rows(pairs))
    if not rows:
        raise PairsError(f"--pairs {pairs}: holds no pairs")
    names = set(rows[0][1])
    key = "id" if documents is not None else "text"
    if missing := [name for name in ("query", key) if name not in names]:
        raise PairsError(_missing(pairs, missing, names, documents))
    if documents is None:
        texts = list(dict.fromkeys(_text(pairs, line, row, "text") for line, row in rows))
        number = {text: place for place, text in enumerate(texts)}
    else:
        found = {
            _text(documents, line, row, "id"): _text(documents, line, row, "text") for line, row in _rows(documents)
        }
        texts, number = list(found.values()), {name: place for place, name in enumerate(found)}
    relevant: dict[str, set[int]] = {}
    unknown = []
    for line, row in rows:
        query, wanted = _text(pairs, line, row, "query"), _text(pairs, line, row, key)
        if wanted in number:
            relevant.setdefault(query, set()).add(number[wanted])
        else:
            unknown.append(f"line {line}: {wanted}")
    if unknown:
        raise PairsError(
            f"--pairs {pairs}: {len(unknown):,} of {len(rows):,} pairs name no document of {documents}: "
            f"{excerpt(unknown, _MOST_NAMED)}"
        )
    if len(texts) < 2:
        raise PairsError(f"--pairs {pairs}: there is one text to search; a retrieval test needs at least two")
    return RetrievalTest(list(relevant), texts, [sorted(each) for each in relevant.values()])


def _missing(pairs: Path, missing: list[str], names: set[str], documents: Path | None) -> str:
    near = "".join(suggest(name, sorted(names)) for name in missing)
    other = "; with --documents FILE, pairs may have `id` instead of `text`" if documents is None else ""
    return (
        f"--pairs {pairs}: has no {' and no '.join(missing)}{near}; its columns are {', '.join(sorted(names))}{other}"
    )


def _text(path: Path, line: int, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and name == "id":
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise PairsError(f"{path}, line {line}: `{name}` must be a text, not {str(value)[:40]!r}")
    return value


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with the numbers of their lines."""
    if not path.is_file():
        raise PairsError(f"{path}: there is no such file")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise PairsError(f"{path}: has {size:,} bytes; at most {MOST_BYTES:,} are read")
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if path.suffix in _CSV:
                reader = csv.DictReader(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
                for row in reader:
                    yield reader.line_num, row
                return
            for line, text in enumerate(stream, 1):
                if text.strip():
                    row = json.loads(text)
                    if not isinstance(row, dict):
                        raise PairsError(f"{path}, line {line}: a {type(row).__name__}, not an object with names")
                    yield line, row
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error, RecursionError) as error:
        kind = "CSV" if path.suffix in _CSV else "JSON Lines"
        raise PairsError(f"{path}: is not {kind} in UTF-8 ({error})") from error


F32 = NDArray[np.float32]
_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75


class Lexicon:
    """Words of G texts, with the weights by which queries are compared with them.

    N texts, n(w) of them with word w, f(w, t) occurrences of w in t, |t| words of t.

    - BM25 (Robertson and Zaragoza 2009): sum over words w of the query of
      ln(1 + (N - n + 0.5) / (n + 0.5)) * f (k1 + 1) / (f + k1 (1 - b + b |t| / mean |t|)), k1 = 1.2, b = 0.75.
    - IDF cosine: cosine of vectors with (1 + ln f) ln(1 + N / n(w)) for each word; words of no text are left out.

    Args:
        texts: to search.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._words: dict[str, int] = {}
        counts = self._counts(texts, grow=True)
        self._in_texts = np.bincount(counts.indices, minlength=len(self._words)).astype(np.float64)
        total = max(1, len(texts))
        lengths = np.asarray(counts.sum(axis=1)).ravel()
        norm = _K1 * (1 - _B + _B * lengths / max(1e-12, lengths.mean()))
        rarity = np.log1p((total - self._in_texts + 0.5) / (self._in_texts + 0.5))
        saturated = counts.copy()
        owners = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
        saturated.data = counts.data * (_K1 + 1) / (counts.data + norm[owners]) * rarity[counts.indices]
        self._bm25, self._idf = saturated, np.log1p(total / np.maximum(1, self._in_texts))
        self._unit = self._weighted(counts)

    def bm25(self, queries: Sequence[str]) -> F32:
        """`(Q, G)` BM25 scores; each word of a query counts once."""
        counts = self._counts(queries)
        counts.data = np.ones_like(counts.data)
        return np.asarray((counts @ self._bm25.T).todense(), np.float32)

    def idf_cosine(self, queries: Sequence[str]) -> F32:
        """`(Q, G)` cosines between 0 and 1."""
        return np.asarray((self._weighted(self._counts(queries)) @ self._unit.T).todense(), np.float32)

    def _weighted(self, counts: csr_matrix) -> csr_matrix:
        """Unit rows of words weighted by (1 + ln f) idf."""
        weighted = counts.copy()
        weighted.data = (1 + np.log(counts.data)) * self._idf[counts.indices]
        norms = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
        weighted.data /= np.repeat(np.maximum(norms, 1e-12), np.diff(weighted.indptr))
        return weighted

    def _counts(self, texts: Sequence[str], grow: bool = False) -> csr_matrix:
        """`(n, words)` occurrences."""
        starts, places, numbers = [0], list[int](), list[int]()
        for text in texts:
            for word, number in Counter(_WORD.findall(text.lower())).items():
                place = self._words.setdefault(word, len(self._words)) if grow else self._words.get(word)
                if place is not None:
                    places.append(place)
                    numbers.append(number)
            starts.append(len(places))
        shape = (len(texts), len(self._words))
        return csr_matrix((np.array(numbers, np.float64), np.array(places, np.int32), np.array(starts)), shape)
