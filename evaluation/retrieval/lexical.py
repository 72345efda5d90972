"""Lexical baselines that need no encoder: BM25, and the cosine of vectors of words weighted by their rarity (IDF)."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

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
