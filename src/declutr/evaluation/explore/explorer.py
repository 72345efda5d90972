"""Answers for the page, as values for JSON: the map of an index, and the texts nearest to a query or a text.

The map is the plane in which embeddings differ most: their first two principal components (Pearson, 1901). With mean m
and covariance C = 1/n sum_i (x_i - m)(x_i - m)^T, a vector x is shown at (u_1, u_2)^T (x - m), where u_1 and u_2 are
the eigenvectors of C with the largest eigenvalues. The map is linear, so new vectors can be placed too.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from declutr.common import seeding
from declutr.embedding.config import EmbedError
from declutr.embedding.index import NO_TEXT, Hit, SearchIndex
from declutr.embedding.output import Stored
from declutr.encoders.protocol import SentenceEncoder
from declutr.evaluation.report.markup import visible
from declutr.evaluation.report.tally import OTHERS, Grouping
from declutr.trainer.data.plan import permute


@dataclass(frozen=True)
class Plane:
    """Plane through embeddings."""

    mean: NDArray[np.float64]
    """`(size,)`."""
    axes: NDArray[np.float64]
    """`(size, 2)`, of length 1; the second is null if the embeddings lie on a line."""
    share: float
    """Share of the variance within the plane, in [0, 1]; 1 if there is no variance."""

    def place(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Coordinates `(n, 2)` of vectors `(n, size)`."""
        placed: NDArray[np.float64] = (vectors - self.mean) @ self.axes
        return placed


_LEAST_SHARE = 1e-12  # of the largest eigenvalue


def fit_plane(vectors: NDArray[np.float32]) -> Plane:
    """Fit the plane of vectors `(n, size)`, n and size at least 1. Their order affects rounding only."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    centred = vectors - mean
    count, size = centred.shape
    # The smaller of the two products has the same eigenvalues: the size comes from a file, and may be any.
    product = (centred.T @ centred if size <= count else centred @ centred.T) / count
    order = len(product)
    found, columns = eigh(product, subset_by_index=[max(0, order - 2), order - 1])
    if size > count:  # eigenvectors of the other product, of length 1
        real = found > _LEAST_SHARE * found[-1]  # others are rounding
        columns = np.where(real, centred.T @ columns / np.sqrt(np.where(real, found * count, 1.0)), 0.0)
    axes = np.zeros((size, 2))
    axes[:, : len(found)] = columns[:, ::-1]
    # The sign of an eigenvector is arbitrary: make the number of largest magnitude positive.
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    total = float(np.trace(product))
    return Plane(mean, axes, min(1.0, max(0.0, float(found.sum()) / total)) if total else 1.0)


MAX_QUERY_CHARACTERS = 4_000
_POINT_CHARACTERS, _HIT_CHARACTERS, _TEXT_CHARACTERS, _NAME_CHARACTERS = 120, 600, 10_000, 200
_DIGITS = 5

Json = dict[str, Any]


class ExploreError(ValueError):
    """A question without an answer."""


class Explorer:
    """Index with its encoder. Any thread may ask; questions are answered one at a time.

    Texts and vectors stay on the disk, except those of the map. From an index of more than `map_texts` texts, this many
    are drawn for the map, always the same ones. An answer has `top` texts.

    Raises:
        EmbedError: the encoder did not make the index, or the index is empty.
    """

    def __init__(self, index: SearchIndex, encoder: SentenceEncoder, top: int = 10, map_texts: int = 5_000) -> None:
        index.check(encoder)
        if not index.facts.rows:
            raise EmbedError(NO_TEXT)
        self._index, self._encoder, self._top = index, encoder, top
        self._lock = threading.Lock()
        rows = sample_rows(index.facts.rows, map_texts)
        vectors = index.vectors(rows)
        self._plane = fit_plane(vectors)
        texts = index.texts(rows)
        self._grouping = Grouping([text.source for text in texts])
        self._points = self._described(texts, _POINT_CHARACTERS, vectors)

    def map(self) -> Json:
        """Facts about the index, names of the groups, and points of the map."""
        facts = self._index.facts
        return {
            "encoder": visible(facts.choice.model),
            "texts": facts.rows,
            "size": facts.size,
            "kind": facts.kind,
            "weight": facts.hybrid and facts.hybrid.weight,
            "share": round(self._plane.share, 4),
            "groups": [*(visible(name[:_NAME_CHARACTERS]) for name in self._grouping.names), OTHERS],
            "points": self._points,
        }

    def search(self, query: str) -> Json:
        """Find the texts nearest to a query, and the query's place on the map.

        Raises:
            ExploreError: the query is empty, too long, or has no word that the encoder knows.
        """
        if not query.strip():
            raise ExploreError("the query is empty: type a sentence")
        if len(query) > MAX_QUERY_CHARACTERS:
            raise ExploreError(f"the query has {len(query):,} characters; shorten it to {MAX_QUERY_CHARACTERS:,}")
        with self._lock:  # tokenizers are not thread-safe
            vector = self._index.embed(self._encoder, query)
            x, y = self._places(vector[None])[0]
            return {"query": {"x": x, "y": y}, "hits": self._hits(self._found(vector, self._top, query))}

    def neighbours(self, row: int) -> Json:
        """Return a text of the index, and the texts nearest to it.

        Raises:
            ExploreError: the index has no such text.
        """
        if not 0 <= row < self._index.facts.rows:
            raise ExploreError(f"row {row:,} is not in the index of {self._index.facts.rows:,} texts, counted from 0")
        with self._lock:
            vector = self._index.vectors([row])
            stored = self._index.texts([row])
            others = [hit for hit in self._found(vector[0], self._top + 1, stored[0].text) if hit.row != row]
            (text,) = self._described(stored, _TEXT_CHARACTERS, vector)
            return {"text": text, "hits": self._hits(others[: self._top])}

    def _found(self, vector: NDArray[np.float32], top: int, query: str) -> list[Hit]:
        try:
            return self._index.hits(vector, top, query)
        except EmbedError as error:  # nothing known is in the query
            raise ExploreError(str(error)) from error

    def _hits(self, hits: Sequence[Hit]) -> list[Json]:
        vectors = self._index.vectors([hit.row for hit in hits])
        scores = (
            {"score": round(hit.score, _DIGITS), "cosine": round(hit.cosine, _DIGITS)}
            | ({} if hit.lexical is None else {"lexical": round(hit.lexical, _DIGITS)})
            for hit in hits
        )
        described = self._described(hits, _HIT_CHARACTERS, vectors)
        return [told | score for told, score in zip(described, scores, strict=True)]

    def _described(self, texts: Sequence[Stored], num_characters: int, vectors: NDArray[np.float32]) -> list[Json]:
        """Texts with place and group, cut to that many characters, without characters that control a page."""
        return [
            {
                "row": text.row,
                "record": text.record,
                "id": None if text.id is None else visible(text.id[:_NAME_CHARACTERS]),
                "source": visible(text.source[:_NAME_CHARACTERS]),
                "text": visible(text.text[:num_characters]) + ("…" if len(text.text) > num_characters else ""),
                "group": self._grouping.number(text.source),
                "x": x,
                "y": y,
            }
            for text, (x, y) in zip(texts, self._places(vectors), strict=True)
        ]

    def _places(self, vectors: NDArray[np.float32]) -> list[list[float]]:
        places: list[list[float]] = self._plane.place(vectors).round(_DIGITS).tolist()
        return places


def sample_rows(num_rows: int, count: int, seed: int = 0) -> list[int]:
    """Ascending numbers below `num_rows`: `count` of them drawn by (seed, "explore"), or all if there are fewer."""
    drawn = np.arange(min(num_rows, count))
    if num_rows > count:
        drawn = np.sort(permute(seeding.key_for(seed, "explore"), np.zeros_like(drawn), drawn, num_rows))
    rows: list[int] = drawn.tolist()
    return rows
