"""Index of embeddings: a folder with the vectors, the texts, and the encoder that queries need.

Similarity is the cosine of vectors scaled to length 1. A search compares every vector, stored as float32 or int8. A
hybrid index has the words of its texts too, and the score of a text is then cosine + weight * lexical score. In an
index of passages a document has the score of its best passage, and is an answer once.

Everything that is read may come from someone else: it is mapped or parsed as data, and checked before use.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import shorten
from declutr.common.errors import EncoderError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.embedding import INDEX, check_index
from declutr.embedding.postings import StoredWords
from declutr.embedding.stored import Stored, StoredTexts, StoredVectors
from declutr.embedding.units import Coverage, Shape, VectorType, shaped
from declutr.encoders.protocol import EncoderChoice, SentenceEncoder, encode_counted, in_role, unloadable
from declutr.evaluation.retrieval.lexicon import LexicalKind

VECTORS, TEXTS = "vectors.npy", "texts.arrow"
_FILE = re.compile(r"[a-z0-9-]+\.[a-z]+")  # no separator: an index has no files elsewhere
_MOST_QUERY_CHARACTERS = 100_000
NO_TEXT = "the index holds no text"
NO_WORD = "the encoder knows no word of the query, so its embedding is null and nothing is near it"


class Hybrid(Strict):
    """Words of an index, and how much they count."""

    kind: LexicalKind
    weight: float = Field(ge=0, le=100, allow_inf_nan=False)  # factor of the lexical score; the cosine has factor 1
    words: int  # number of different words
    chosen_on: int | None = None  # queries on which the weight was chosen; None if it was given


class IndexFacts(Coverage):
    """Facts about an index, stored in it."""

    version: Literal[5] = 5
    kind: Literal["exact"] = "exact"  # an index with graphs, which had "graph", is refused by its value
    rows: int
    choice: EncoderChoice  # the encoder that made the embeddings
    shape: Shape
    size: int
    fingerprint: str
    files: dict[str, str]  # SHA-256 of each file
    dtype: VectorType = "float32"  # type of the stored vectors
    hybrid: Hybrid | None = None
    passages: bool = False  # A row is a passage of a text, not a text


def best_rows(scores: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """Rows of the `top` highest scores `(rows,)`, best first, of equal ones the first rows; all if there are fewer."""
    low = -scores  # ascending, so that the stable sort keeps the first of equal rows first
    rows = np.arange(len(low))
    if top < len(low):
        # Sorting all would take longer than computing the scores.
        rows = np.flatnonzero(~(low > np.partition(low, top - 1)[top - 1]))  # with `~` NaN stays, and is sorted last
    return rows[np.argsort(low[rows], kind="stable")[:top]]


@dataclass(frozen=True, kw_only=True)
class Hit(Stored):
    """A text that was found."""

    score: float  # cosine, plus weight times lexical score in a hybrid index
    cosine: float  # in [-1, 1]
    lexical: float | None  # in [0, 1]; None in an index without words


class SearchIndex:
    """Index in a folder; opening it runs no code from the folder, and altered files are refused.

    `facts` are given while the index is being built; otherwise they are read and the files are compared with them.
    """

    def __init__(self, folder: Path, facts: IndexFacts | None = None) -> None:
        self.facts = facts or _checked_facts(folder)
        self._texts = StoredTexts(folder / TEXTS, self.facts.rows, self.facts.passages)
        self._firsts = self._texts.first_rows() if self.facts.passages else np.arange(self.facts.rows)
        self._vectors = StoredVectors(folder / VECTORS, self.facts.rows, self.facts.size, self.facts.dtype)
        hybrid = self.facts.hybrid
        self._words = StoredWords(folder, self.facts.rows, hybrid.kind) if hybrid else None
        self.weight = hybrid.weight if hybrid else 0.0  # of the words

    def check(self, encoder: SentenceEncoder) -> None:
        """Check that an encoder made this index."""
        size = min(encoder.size, self.facts.shape.dimensions or encoder.size)
        # Vectors of another encoder of that size fit, and mean nothing.
        if encoder.fingerprint != self.facts.fingerprint or size != self.facts.size:
            raise UsageError(
                f"the index was made with {self.facts.choice.model} ({self.facts.fingerprint[:12]}); {encoder.name} "
                f"({encoder.fingerprint[:12]}) gives different vectors; use the encoder of the index, or embed the "
                "texts again and build it from them"
            )

    def embed(self, encoder: SentenceEncoder, query: str) -> NDArray[np.float32]:
        """Vector of a query, `(size,)`, of length 1; a null vector stays null."""
        shape = self.facts.shape.model_copy(update={"normalise": True})  # a cosine is a product of unit vectors
        if shape.dtype == "int8":  # a query is not rounded
            shape = shape.model_copy(update={"dtype": "float32"})
        whole = query.encode("utf-8", "replace").decode()  # a terminal may give half a character
        states, ((tokens, read),) = encode_counted(in_role(encoder, "query"), [whole])
        if read < tokens:
            get_logger().warning("the query has %d tokens, of which the encoder reads %d", tokens, read)
        return shaped(states, shape)[0].astype(np.float32)

    def hits(self, vector: NDArray[np.float32], top: int, query: str) -> list[Hit]:
        """Texts best for a vector `(size,)` of length 1 and, in a hybrid index, the words of a query; best first."""
        has_words = bool(vector.any())
        if self._words is None and not has_words:
            raise UsageError(NO_WORD)
        cosines, lexical = self.parts(vector, query)
        if not has_words and not lexical.any():
            raise UsageError(f"{NO_WORD}, and no text of the index has a word of it")
        scores = cosines + np.float32(self.weight) * lexical
        firsts = self._firsts[best_rows(self.by_document(scores), top)]
        ends = np.append(self._firsts, self.facts.rows)[np.searchsorted(self._firsts, firsts, side="right")]
        slices = zip(firsts.tolist(), ends.tolist(), strict=True)
        rows = np.array([first + int(scores[first:end].argmax()) for first, end in slices], np.int64)
        parts = zip(*(part[rows].tolist() for part in (scores, cosines, lexical)), strict=True)
        return [
            Hit(**vars(text), score=score, cosine=cosine, lexical=None if self._words is None else words)
            for text, (score, cosine, words) in zip(self.texts(rows.tolist()), parts, strict=True)
        ]

    def document(self, row: int) -> int:
        """Number of the document of a row."""
        return int(np.searchsorted(self._firsts, row, side="right")) - 1

    def by_document(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """`(documents,)` scores of their best rows."""
        return np.maximum.reduceat(scores, self._firsts) if len(scores) else scores

    def parts(self, vector: NDArray[np.float32], query: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and lexical scores, each `(rows,)`, of a query's vector `(size,)` and its words; 0 without words."""
        cosines = self._vectors.cosines(vector[None])[0]
        return cosines, np.zeros_like(cosines) if self._words is None else self._words.scores(query)

    def texts(self, rows: Sequence[int]) -> list[Stored]:
        """Stored texts of these rows."""
        return [self._texts.at(row) for row in rows]


def _checked_facts(folder: Path) -> IndexFacts:
    """Facts about the index in a folder, after a check that its files are whole."""
    check_index(folder)
    try:
        facts = IndexFacts.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else first_problem(error, IndexFacts)
        raise UsageError(
            f"{folder / INDEX} is not an index of this version of `declutr index` ({why}); build the index again: "
            "`declutr index EMBEDDINGS --output FOLDER`"
        ) from error
    for name, digest in facts.files.items():  # before any is opened: the folder may come from someone else
        if not _FILE.fullmatch(name) or not (folder / name).is_file() or hash_file(folder / name) != digest:
            raise UsageError(f"{folder}: {name} is missing or altered; build the index again")
    return facts


class Searcher(SearchIndex):
    """An open index, for a service: its threads may share it, and it answers them one after the other.

    Args:
        index: folder of `declutr index`.
        model: the encoder, if it has moved since; None: the one that the index names, and the hub is not asked for it.
        weight: of the words of a hybrid index; None: the index's.
        trust_remote_code: run Python code that comes with the encoder.

    Raises:
        UsageError: the weight is not within 0..100, or the folder holds no index, one that is altered, or one of
            another encoder.
        EncoderError: the encoder cannot be loaded.
    """

    def __init__(
        self,
        index: str | PathLike[str],
        *,
        model: str | PathLike[str] | None = None,
        weight: float | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        check_weight(weight)
        super().__init__(expand(index, "index"))
        if not self.facts.rows:
            raise UsageError(NO_TEXT)
        if weight is not None:
            if self.facts.hybrid is None:
                raise UsageError(f"--weight {weight:g}: the index has no words; build it again with `--hybrid`")
            self.weight = weight
        model = None if model is None else str(model)
        if model and (problem := unloadable(model)):
            raise EncoderError(problem)
        from declutr.encoders.loading import encoder_of_index  # loads torch, which no problem of the index waits for

        self._encoder = encoder_of_index(self.facts.choice, model, trust_remote_code=trust_remote_code)
        self.check(self._encoder)
        self._lock = threading.Lock()

    def search(self, query: str, top: int = 10) -> list[Hit]:
        """The best `top` texts for a query, best first; of an index of passages the best passage of each text.

        Raises:
            UsageError: the query is empty, too long or no text, no word of it is known, or `top` is below 1.
        """
        check_query(query, top)
        with self._lock:  # the encoder sets the number of torch's threads, which all threads share
            return self.hits(self.embed(self._encoder, query), top, query)


def check_weight(weight: Any) -> None:
    """Raises UsageError unless a weight of the words is None or a number from 0 to 100."""
    if weight is not None and not (isinstance(weight, int | float) and 0 <= weight <= 100):
        value = f"{weight:g}" if isinstance(weight, float) else repr(weight)
        raise UsageError(f"--weight {value}: must be a number from 0 to 100")


def check_query(query: Any, top: Any) -> None:
    """Raises UsageError unless a query is a text with words and `top` a number of answers."""
    if not isinstance(query, str):
        raise UsageError(f"query = {shorten(repr(query), 60)}: must be one text; search each of several")
    if not query.strip():
        raise UsageError("the query is empty; give at least one word")
    if len(query) > _MOST_QUERY_CHARACTERS:
        raise UsageError(f"the query has {len(query):,} characters; at most {_MOST_QUERY_CHARACTERS:,} are read")
    if not isinstance(top, int) or top < 1:
        raise UsageError(f"top = {top!r}: must be a whole number of at least 1")


def search(index: str | PathLike[str], query: str, top: int = 10, **settings: Any) -> list[Hit]:
    """Search an index once; `Searcher` opens it for many queries, and has the settings and errors."""
    check_query(query, top)  # before the encoder is loaded
    return Searcher(index, **settings).search(query, top)
