"""Index of embeddings: a folder with the vectors or their graphs, the texts, and the encoder that queries need.

Similarity is the cosine of vectors scaled to length 1. Up to `EXACT_ROWS`, a search compares every vector. Above, it
follows graphs (src/declutr/embedding/graphs.py), which find nearly all nearest vectors in a fraction of the time.

A hybrid index has the words of its texts too (src/declutr/embedding/lexical.py). The score of a text is then
cosine + weight * lexical score. Without graphs every text is scored; with graphs those are that are among the nearest
by cosine or among the best by words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.storage import hash_file
from declutr.embedding.config import EmbedError, Shape, VectorType
from declutr.embedding.exact import ExactVectors
from declutr.embedding.graphs import Graphs
from declutr.embedding.lexical import StoredWords
from declutr.embedding.output import Stored, StoredTexts
from declutr.embedding.units import shaped
from declutr.encoders.protocol import EncoderChoice, SentenceEncoder
from declutr.evaluation.retrieval.lexicon import LexicalKind

INDEX = "index.json"
VECTORS, TEXTS = "vectors.npy", "texts.arrow"
_FILE = re.compile(r"[a-z0-9-]+\.[a-z]+")
MOST_WEIGHT = 100.0
_LEAST_CANDIDATES, _CANDIDATES = 200, 10
"""Texts that graphs and words each propose to a hybrid search: at least this many, and for each text wanted."""
EMPTY = "the query is empty; give at least one word"
NO_TEXT = "the index holds no text"
NO_WORD = "the encoder knows no word of the query, so its embedding is null and nothing is near it"

Kind = Literal["exact", "graph"]


class Hybrid(Strict):
    """Words of an index, and how much they count."""

    kind: LexicalKind
    weight: float = Field(ge=0, le=MOST_WEIGHT, allow_inf_nan=False)
    """Factor of the lexical score; the cosine has factor 1."""
    words: int
    """Number of different words."""
    chosen_on: int | None = None
    """Queries on which the weight was chosen; None if it was given."""


class IndexFacts(Strict):
    """Facts about an index, stored in it."""

    version: Literal[4] = 4
    kind: Kind
    rows: int
    choice: EncoderChoice
    """The encoder that made the embeddings."""
    shape: Shape
    size: int
    fingerprint: str
    files: dict[str, str]
    """SHA-256 of each file."""
    dtype: VectorType = "float32"
    """Type of the stored vectors."""
    recall: float | None = None
    """Share of the ten nearest texts by float32 that int8 finds, measured when the index was made."""
    hybrid: Hybrid | None = None


@dataclass(frozen=True)
class Hit(Stored):
    """A text that was found.

    Attributes:
        score: cosine, plus weight times lexical score in a hybrid index.
        cosine: in [-1, 1].
        lexical: in [0, 1]; None in an index without words.
    """

    score: float
    cosine: float
    lexical: float | None


class SearchIndex:
    """Index in a folder; opening it runs no code from the folder, and altered files are refused.

    `facts` are given while the index is being built; otherwise they are read and the files are compared with them.

    Raises:
        EmbedError: the folder holds no index, or one that is incomplete, altered, or of another version.
    """

    def __init__(self, folder: Path, facts: IndexFacts | None = None) -> None:
        self.facts = facts or _checked_facts(folder)
        self._texts = StoredTexts(folder / TEXTS, self.facts.rows)
        size, dtype = self.facts.size, self.facts.dtype
        self._vectors: ExactVectors | Graphs
        if self.facts.kind == "exact":
            self._vectors = ExactVectors(folder / VECTORS, self.facts.rows, size, dtype)
        else:
            graphs = sorted(name for name in self.facts.files if name.startswith("graph-"))
            self._vectors = Graphs([folder / name for name in graphs], size, dtype)
        if len(self._vectors) != self.facts.rows:
            raise EmbedError(f"{folder}: its graphs hold {len(self._vectors):,} rows, not {self.facts.rows:,}")
        hybrid = self.facts.hybrid
        self._words = StoredWords(folder, self.facts.rows, hybrid.kind) if hybrid else None
        self.weight = hybrid.weight if hybrid else 0.0

    def weigh(self, weight: float) -> None:
        """Replace the weight of the words.

        Raises:
            EmbedError: the index has no words.
        """
        if self._words is None:
            raise EmbedError(f"--weight {weight:g}: the index has no words; build it again with `--hybrid`")
        self.weight = weight

    def search(self, encoder: SentenceEncoder, query: str, top: int = 10) -> list[Hit]:
        """Find the best texts, best first.

        Raises:
            EmbedError: the encoder did not make the index, or index or query are empty, or no word is known.
        """
        self.check(encoder)
        if not query.strip():
            raise EmbedError(EMPTY)
        if not self.facts.rows:
            raise EmbedError(NO_TEXT)
        return self.hits(self.embed(encoder, query), top, query)

    def check(self, encoder: SentenceEncoder) -> None:
        """Check that an encoder made this index.

        Raises:
            EmbedError: another encoder made the index.
        """
        size = min(encoder.size, self.facts.shape.dimensions or encoder.size)
        if encoder.fingerprint != self.facts.fingerprint or size != self.facts.size:
            raise EmbedError(
                f"the index was made with {self.facts.choice.model} ({self.facts.fingerprint[:12]}); {encoder.name} "
                f"({encoder.fingerprint[:12]}) gives different vectors; use the encoder of the index, or embed the "
                "texts again and build it from them"
            )

    def embed(self, encoder: SentenceEncoder, query: str) -> NDArray[np.float32]:
        """Vector of a query, `(size,)`, of length 1; a null vector stays null."""
        shape = self.facts.shape.model_copy(update={"normalise": True})
        if shape.dtype == "int8":  # a query is not rounded
            shape = shape.model_copy(update={"dtype": "float32"})
        whole = query.encode("utf-8", "replace").decode()  # a terminal may give half a character
        vector: NDArray[np.float32] = shaped(encoder.encode([whole]), shape)[0].astype(np.float32)
        return vector

    def hits(self, vector: NDArray[np.float32], top: int, query: str) -> list[Hit]:
        """Texts best for a vector `(size,)` of length 1 and, in a hybrid index, for the words of a query; best first.

        Raises:
            EmbedError: the vector is null, and no text has a word of the query.
        """
        if self._words is None:
            if not vector.any():
                raise EmbedError(NO_WORD)
            rows, cosines = (found[0] for found in self.nearest(vector[None], top))
            stored = zip(self.texts(rows.tolist()), cosines.tolist(), strict=True)
            return [Hit(**vars(text), score=cosine, cosine=cosine, lexical=None) for text, cosine in stored]
        rows, cosines, lexical = self.candidates(vector, query, top)
        if not vector.any() and not lexical.any():
            raise EmbedError(f"{NO_WORD}, and no text of the index has a word of it")
        scores = cosines + np.float32(self.weight) * lexical
        best = np.argsort(-scores, kind="stable")[:top]
        parts = zip(*(part[best].tolist() for part in (scores, cosines, lexical)), strict=True)
        texts = self.texts(rows[best].tolist())
        return [
            Hit(**vars(text), score=score, cosine=cosine, lexical=words)
            for text, (score, cosine, words) in zip(texts, parts, strict=True)
        ]

    def candidates(
        self, vector: NDArray[np.float32], query: str, top: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Ascending rows `(n,)` from which a hybrid search takes the best `top`, their cosines and lexical scores."""
        assert self._words is not None
        lexical = self._words.scores(query)
        if isinstance(self._vectors, ExactVectors):
            return np.arange(self.facts.rows), self._vectors.cosines(vector[None])[0], lexical
        most = min(self.facts.rows, max(_LEAST_CANDIDATES, _CANDIDATES * top))
        by_words = np.argsort(-lexical, kind="stable")[:most]
        by_cosine = self._vectors.nearest(vector[None], most)[0][0] if vector.any() else by_words
        rows = np.union1d(by_cosine, by_words[lexical[by_words] > 0])
        return rows, self._vectors.vectors(rows.tolist()) @ vector, lexical[rows]

    def nearest(self, queries: NDArray[np.float32], top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and cosines, each `(queries, top)`, nearest first; all rows if the index holds fewer.

        `queries` is `(queries, size)`, of length 1.
        """
        top = min(top, self.facts.rows)
        if not top:
            return np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
        return self._vectors.nearest(queries, top)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        return self._vectors.vectors(rows)

    def texts(self, rows: Sequence[int]) -> list[Stored]:
        """Stored texts of these rows."""
        return [self._texts.at(row) for row in rows]


def _checked_facts(folder: Path) -> IndexFacts:
    """Facts about the index in a folder, after a check that its files are whole."""
    if not (folder / INDEX).is_file():
        raise EmbedError(f"{folder} is not an index; make one with `declutr index EMBEDDINGS --output FOLDER`")
    try:
        facts = IndexFacts.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else first_problem(error, IndexFacts)
        raise EmbedError(
            f"{folder / INDEX} is not an index of this version of `declutr index` ({why}); build the index again"
        ) from error
    for name, digest in facts.files.items():
        if not _FILE.fullmatch(name) or not (folder / name).is_file() or hash_file(folder / name) != digest:
            raise EmbedError(f"{folder}: {name} is missing or altered; build the index again")
    return facts
