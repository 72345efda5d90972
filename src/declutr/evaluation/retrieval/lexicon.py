"""Lexical scores of queries: BM25 and the cosine of IDF vectors.

Legend: N texts (G of them to search), n(w) of them with word w, f(w, t) occurrences of w in t, |t| words of t.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from declutr.common.words import lexical_words

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
LexicalKind = Literal["idf", "bm25"]
NAMES: dict[LexicalKind, str] = {"idf": "IDF cosine", "bm25": "BM25"}
_K1, _B = 1.2, 0.75


def rarities(kind: LexicalKind, in_texts: F64, total: int) -> F64:
    """Weight of each word in n texts. bm25: ln(1 + (N - n + 0.5) / (n + 0.5)). idf: ln(1 + N / n)."""
    # 0 texts: a word of the query alone
    odds = (total - in_texts + 0.5) / (in_texts + 0.5) if kind == "bm25" else total / np.maximum(1, in_texts)
    return np.log1p(odds)


def query_weights(kind: LexicalKind, occurrences: F64, in_texts: F64, total: int) -> F64:
    """Weight of each word of a query, by which its stored weights in the texts are multiplied.

    idf: of length 1, so that the score is a cosine. bm25: 1 / (highest possible score of the query), so that scores are
    between 0 and 1 too; the order of the texts is that of BM25.
    """
    rarity = rarities(kind, in_texts, total)
    if kind == "bm25":
        return np.full(len(rarity), 1 / max(1e-12, float(rarity.sum()) * (_K1 + 1)))
    weights = (1 + np.log(occurrences)) * rarity
    return weights / max(1e-12, float(np.linalg.norm(weights)))


class Lexicon:
    """Words of G texts, which are read once, with the weights by which queries are compared with them.

    - BM25 (Robertson and Zaragoza 2009): sum over words w of the query of
      ln(1 + (N - n + 0.5) / (n + 0.5)) * f (k1 + 1) / (f + k1 (1 - b + b |t| / mean |t|)), k1 = 1.2, b = 0.75.
    - IDF cosine: cosine of vectors with (1 + ln f) ln(1 + N / n(w)) for each word; words of no text are left out.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.words: dict[str, int] = {}
        self._counts = self._count(texts, grow=True)
        self.in_texts = np.bincount(self._counts.indices, minlength=len(self.words)).astype(np.float64)
        self._total = max(1, self._counts.shape[0])

    def bm25(self, queries: Sequence[str]) -> F32:
        """`(Q, G)` BM25 scores; each word of a query counts once."""
        counts = self._count(queries)
        counts.data = np.ones_like(counts.data)
        return np.asarray((counts @ self._bm25.T).todense(), np.float32)

    def idf_cosine(self, queries: Sequence[str]) -> F32:
        """`(Q, G)` cosines between 0 and 1."""
        return np.asarray((self._weighted(self._count(queries)) @ self._unit.T).todense(), np.float32)

    def weights(self, kind: LexicalKind) -> csr_matrix:
        """`(G, words)` weights of the words in the texts."""
        return self._bm25 if kind == "bm25" else self._unit

    @cached_property
    def _bm25(self) -> csr_matrix:
        counts = self._counts
        lengths = np.asarray(counts.sum(axis=1)).ravel()
        norm = _K1 * (1 - _B + _B * lengths / max(1e-12, lengths.mean())) if len(lengths) else lengths
        saturated = counts.copy()
        owners = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))
        rarity = rarities("bm25", self.in_texts, self._total)
        saturated.data = counts.data * (_K1 + 1) / (counts.data + norm[owners]) * rarity[counts.indices]
        return saturated

    @cached_property
    def _unit(self) -> csr_matrix:
        return self._weighted(self._counts)

    @cached_property
    def _idf(self) -> F64:
        return rarities("idf", self.in_texts, self._total)

    def _weighted(self, counts: csr_matrix) -> csr_matrix:
        """Unit rows of words weighted by (1 + ln f) idf."""
        weighted = counts.copy()
        weighted.data = (1 + np.log(counts.data)) * self._idf[counts.indices]
        norms = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
        weighted.data /= np.repeat(np.maximum(norms, 1e-12), np.diff(weighted.indptr))
        return weighted

    def _count(self, texts: Iterable[str], grow: bool = False) -> csr_matrix:
        """`(n, words)` occurrences."""
        # a Python list would take several times the memory
        starts, places, numbers = array("q", [0]), array("i"), array("i")
        for text in texts:
            for word, number in Counter(lexical_words(text)).items():
                place = self.words.setdefault(word, len(self.words)) if grow else self.words.get(word)
                if place is not None:
                    places.append(place)
                    numbers.append(number)
            starts.append(len(places))
        shape = (len(starts) - 1, len(self.words))
        data, columns = np.array(numbers, np.float64), np.array(places, np.int32)
        return csr_matrix((data, columns, np.array(starts)), shape)
