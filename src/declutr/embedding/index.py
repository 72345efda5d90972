"""Index of embeddings: a folder with the vectors, the texts, and the encoder that queries need.

Similarity is the cosine of vectors scaled to length 1. A search compares every vector, stored as float32 or int8. A
hybrid index has the words of its texts too (src/declutr/embedding/lexical.py), and the score of a text is then
cosine + weight * lexical score.

Everything that is read may come from someone else: it is mapped or parsed as data, and checked before use.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.errors import UsageError
from declutr.common.storage import hash_file
from declutr.embedding.lexical import StoredWords
from declutr.embedding.output import CHUNK_ROWS, mapped
from declutr.embedding.units import Shape, VectorType, shaped
from declutr.encoders.protocol import EncoderChoice, SentenceEncoder, unit_rows
from declutr.evaluation.retrieval.lexicon import LexicalKind

INDEX = "index.json"
VECTORS, TEXTS = "vectors.npy", "texts.arrow"
SCHEMA = pa.schema([("record", pa.int64()), ("text", pa.large_string()), ("id", pa.string()), ("source", pa.string())])
"""Columns of the texts of an index. The texts of a batch may have more than 2 GiB, the limit of `string`."""
_FILE = re.compile(r"[a-z0-9-]+\.[a-z]+")
MOST_WEIGHT = 100.0
EMPTY = "the query is empty; give at least one word"
NO_TEXT = "the index holds no text"
NO_WORD = "the encoder knows no word of the query, so its embedding is null and nothing is near it"


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
    kind: Literal["exact"] = "exact"  # an index with graphs, which had "graph", is refused by its value
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
class Stored:
    """One text of an index.

    Attributes:
        row: in the index.
        record: number of the record in the inputs, those that were skipped included.
        id: if the embeddings have ids.
        source: origin.
        text: the whole text.
    """

    row: int
    record: int
    id: str | None
    source: str
    text: str


_MOST_ALLOCATED_BYTES = 2**24  # a mapped batch that is not compressed allocates nothing


class StoredTexts:
    """Memory-mapped file of texts.

    Raises:
        UsageError: the file is cut off, altered, or holds something else.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._checked = path, dict[int, pa.RecordBatch]()
        try:
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes, before = [], pa.total_allocated_bytes()
            for number in range(self._file.num_record_batches):
                batch = self._file.get_batch(number)
                sizes.append(batch.num_rows)
                if pa.total_allocated_bytes() > before + _MOST_ALLOCATED_BYTES:
                    raise self._wrong("its batches are compressed")
        except (pa.ArrowException, OSError) as error:
            raise self._wrong(str(error)) from error
        if self._file.schema != SCHEMA or sum(sizes) != rows or any(size != CHUNK_ROWS for size in sizes[:-1]):
            raise self._wrong(f"not {rows:,} rows of record, text, id and source")

    def at(self, row: int) -> Stored:
        """Text of a row.

        Raises:
            UsageError: the part of the file with this row is altered.
        """
        batch, place = divmod(row, CHUNK_ROWS)
        values: dict[str, Any] = self._batch(batch).slice(place, 1).to_pylist()[0]
        return Stored(row, values["record"], values["id"], values["source"] or "", values["text"] or "")

    def __iter__(self) -> Iterator[str]:
        """Texts without ids and sources, in the order of the rows."""
        for number in range(self._file.num_record_batches):
            yield from (text or "" for text in self._batch(number).column("text").to_pylist())

    def _batch(self, number: int) -> pa.RecordBatch:
        """Batch with checked offsets and UTF-8 texts; an unchecked one could end the process."""
        if number not in self._checked:
            batch = self._file.get_batch(number)
            try:
                batch.validate(full=True)
            except pa.ArrowException as error:
                raise self._wrong(str(error)) from error
            self._checked[number] = batch
        return self._checked[number]

    def _wrong(self, why: str) -> UsageError:
        return UsageError(f"{self._path} is cut off, altered, or not of `declutr index` ({why}); build the index again")


class StoredVectors:
    """Mapped vectors `(rows, size)` of an .npy file: float32 of length 1, or int8, of which the direction counts.

    int8 vectors are compared with queries that are not rounded, so a search computes their cosines to float32.

    Raises:
        UsageError: the file is cut off, altered, or of another shape or type, or a number is not finite.
    """

    def __init__(self, path: Path, rows: int, size: int, dtype: VectorType) -> None:
        self._is_int8 = dtype == "int8"
        self._vectors = mapped(path, rows, size, dtype)
        chunks = (self._vectors[start : start + CHUNK_ROWS] for start in range(0, rows, CHUNK_ROWS))
        if not self._is_int8 and not all(np.isfinite(chunk).all() for chunk in chunks):
            raise UsageError(f"{path} holds numbers that are not finite; build the index again")

    def cosines(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """`(queries, rows)` cosines of queries `(queries, size)` of length 1."""
        if not self._is_int8:
            whole: NDArray[np.float32] = queries @ self._vectors.T
            return whole
        cosines = np.empty((len(queries), len(self._vectors)), np.float32)
        for start in range(0, len(self._vectors), CHUNK_ROWS):
            chunk = unit_rows(self._vectors[start : start + CHUNK_ROWS].astype(np.float32))
            cosines[:, start : start + CHUNK_ROWS] = queries @ chunk.T
        return cosines

    def at(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        vectors = np.asarray(self._vectors[np.asarray(rows, np.int64)])
        return unit_rows(vectors.astype(np.float32)) if self._is_int8 else vectors


def best_rows(scores: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """Rows of the `top` highest scores `(rows,)`, highest first, of equal ones the first rows; all if there are fewer.

    Only those as high as the last of them are sorted: sorting all would take longer than computing the scores.
    """
    low = -scores
    rows = np.arange(len(low))
    if top < len(low):
        rows = np.flatnonzero(~(low > np.partition(low, top - 1)[top - 1]))  # with `~` NaN stays, and is sorted last
    return rows[np.argsort(low[rows], kind="stable")[:top]]


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
        UsageError: the folder holds no index, or one that is incomplete, altered, or of another version.
    """

    def __init__(self, folder: Path, facts: IndexFacts | None = None) -> None:
        self.facts = facts or _checked_facts(folder)
        self._texts = StoredTexts(folder / TEXTS, self.facts.rows)
        self._vectors = StoredVectors(folder / VECTORS, self.facts.rows, self.facts.size, self.facts.dtype)
        hybrid = self.facts.hybrid
        self._words = StoredWords(folder, self.facts.rows, hybrid.kind) if hybrid else None
        self.weight = hybrid.weight if hybrid else 0.0

    def weigh(self, weight: float) -> None:
        """Replace the weight of the words.

        Raises:
            UsageError: the index has no words.
        """
        if self._words is None:
            raise UsageError(f"--weight {weight:g}: the index has no words; build it again with `--hybrid`")
        self.weight = weight

    def search(self, encoder: SentenceEncoder, query: str, top: int = 10) -> list[Hit]:
        """Find the best texts, best first.

        Raises:
            UsageError: the encoder did not make the index, or index or query are empty, or no word is known.
        """
        self.check(encoder)
        if not query.strip():
            raise UsageError(EMPTY)
        if not self.facts.rows:
            raise UsageError(NO_TEXT)
        return self.hits(self.embed(encoder, query), top, query)

    def check(self, encoder: SentenceEncoder) -> None:
        """Check that an encoder made this index.

        Raises:
            UsageError: another encoder made the index.
        """
        size = min(encoder.size, self.facts.shape.dimensions or encoder.size)
        if encoder.fingerprint != self.facts.fingerprint or size != self.facts.size:
            raise UsageError(
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
            UsageError: the vector is null, and no text has a word of the query.
        """
        if self._words is None:
            if not vector.any():
                raise UsageError(NO_WORD)
            (rows,), (cosines,) = self.nearest(vector[None], top)
            stored = zip(self.texts(rows.tolist()), cosines.tolist(), strict=True)
            return [Hit(**vars(text), score=cosine, cosine=cosine, lexical=None) for text, cosine in stored]
        cosines, lexical = self.parts(vector, query)
        if not vector.any() and not lexical.any():
            raise UsageError(f"{NO_WORD}, and no text of the index has a word of it")
        scores = cosines + np.float32(self.weight) * lexical
        rows = best_rows(scores, top)
        parts = zip(*(part[rows].tolist() for part in (scores, cosines, lexical)), strict=True)
        return [
            Hit(**vars(text), score=score, cosine=cosine, lexical=words)
            for text, (score, cosine, words) in zip(self.texts(rows.tolist()), parts, strict=True)
        ]

    def parts(self, vector: NDArray[np.float32], query: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and lexical scores, each `(rows,)`, of a query's vector `(size,)` and its words; hybrid only."""
        assert self._words is not None
        return self._vectors.cosines(vector[None])[0], self._words.scores(query)

    def nearest(self, queries: NDArray[np.float32], top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and cosines, each `(queries, top)`, nearest first; all rows if the index holds fewer.

        `queries` is `(queries, size)`, of length 1.
        """
        cosines = self._vectors.cosines(queries)
        top = min(top, self.facts.rows)
        rows = np.array([best_rows(scores, top) for scores in cosines], np.int64).reshape(len(queries), top)
        return rows, np.take_along_axis(cosines, rows, axis=1)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        return self._vectors.at(rows)

    def texts(self, rows: Sequence[int]) -> list[Stored]:
        """Stored texts of these rows."""
        return [self._texts.at(row) for row in rows]


def _checked_facts(folder: Path) -> IndexFacts:
    """Facts about the index in a folder, after a check that its files are whole."""
    if not (folder / INDEX).is_file():
        raise UsageError(f"{folder} is not an index; make one with `declutr index EMBEDDINGS --output FOLDER`")
    try:
        facts = IndexFacts.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else first_problem(error, IndexFacts)
        raise UsageError(
            f"{folder / INDEX} is not an index of this version of `declutr index` ({why}); build the index again: "
            "`declutr index EMBEDDINGS --output FOLDER`"
        ) from error
    for name, digest in facts.files.items():
        if not _FILE.fullmatch(name) or not (folder / name).is_file() or hash_file(folder / name) != digest:
            raise UsageError(f"{folder}: {name} is missing or altered; build the index again")
    return facts
