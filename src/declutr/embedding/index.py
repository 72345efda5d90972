"""Index of embeddings: a folder with the vectors, the texts, and the encoder that queries need.

Similarity is the cosine of vectors scaled to length 1. A search compares every vector, stored as float32 or int8. A
hybrid index has the words of its texts too, and the score of a text is then cosine + weight * lexical score. In an
index of passages a document has the score of its best passage, and is an answer once.

Everything that is read may come from someone else: it is mapped or parsed as data, and checked before use.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.errors import EncoderError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.embedding.note import mapped
from declutr.embedding.postings import StoredWords, wrong_file
from declutr.embedding.units import CHUNK_ROWS, Coverage, Shape, VectorType, shaped
from declutr.encoders.protocol import EncoderChoice, SentenceEncoder, in_role, unloadable
from declutr.evaluation.retrieval.lexicon import LexicalKind

INDEX = "index.json"
VECTORS, TEXTS = "vectors.npy", "texts.arrow"
SCHEMA = pa.schema([("record", pa.int64()), ("text", pa.large_string()), ("id", pa.string()), ("source", pa.string())])
"""Columns of the texts of an index. The texts of a batch may have more than 2 GiB, the limit of `string`."""
PASSAGE_SCHEMA = pa.schema([*SCHEMA, ("line", pa.int64()), ("heading", pa.string())])
"""The same for an index of passages."""
_FILE = re.compile(r"[a-z0-9-]+\.[a-z]+")  # no separator: an index has no files elsewhere
NO_TEXT = "the index holds no text"
NO_WORD = "the encoder knows no word of the query, so its embedding is null and nothing is near it"


class Hybrid(Strict):
    """Words of an index, and how much they count."""

    kind: LexicalKind
    weight: float = Field(ge=0, le=100, allow_inf_nan=False)
    """Factor of the lexical score; the cosine has factor 1."""
    words: int
    """Number of different words."""
    chosen_on: int | None = None
    """Queries on which the weight was chosen; None if it was given."""


class IndexFacts(Coverage):
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
    """Of earlier versions, which measured what int8 finds; not read."""
    hybrid: Hybrid | None = None
    passages: bool = False
    """A row is a passage of a text, not a text."""


@dataclass(frozen=True)
class Stored:
    """One text of an index."""

    row: int
    record: int
    """Number of the record in the inputs, those that were skipped included."""
    id: str | None
    """None if the embeddings have no ids."""
    source: str
    text: str
    """The text, or the passage."""
    line: int | None = None
    """Line of the text at which the passage starts, from 1; None for a whole text, as the next one."""
    heading: str | None = None
    """Headings above the passage."""


_MOST_ALLOCATED_BYTES = 2**24  # a mapped batch that is not compressed allocates nothing


class StoredTexts:
    """Memory-mapped file of texts.

    Raises:
        UsageError: the file is cut off, altered, or holds something else.
    """

    def __init__(self, path: Path, rows: int, passages: bool = False) -> None:
        self._path, self._checked = path, dict[int, pa.RecordBatch]()
        schema = PASSAGE_SCHEMA if passages else SCHEMA
        try:
            self._file = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes, before = [], pa.total_allocated_bytes()
            for number in range(self._file.num_record_batches):
                batch = self._file.get_batch(number)
                sizes.append(batch.num_rows)
                if pa.total_allocated_bytes() > before + _MOST_ALLOCATED_BYTES:
                    raise wrong_file(self._path, "its batches are compressed")
        except (pa.ArrowException, OSError) as error:
            raise wrong_file(self._path, str(error)) from error
        # All batches but the last are full, because `at` finds a row by division.
        if self._file.schema != schema or sum(sizes) != rows or any(size != CHUNK_ROWS for size in sizes[:-1]):
            raise wrong_file(self._path, f"not {rows:,} rows of {', '.join(schema.names)}")

    def at(self, row: int) -> Stored:
        """Text of a row.

        Raises:
            UsageError: the part of the file with this row is altered.
        """
        batch, place = divmod(row, CHUNK_ROWS)
        values: dict[str, Any] = self._batch(batch).slice(place, 1).to_pylist()[0]
        # an altered file may have nulls
        return Stored(row, **values | {name: values[name] or "" for name in ("source", "text")})

    def __iter__(self) -> Iterator[str]:
        """Texts with their headings, in the order of the rows."""
        for number in range(self._file.num_record_batches):
            batch = self._batch(number)
            headings = batch.column("heading").to_pylist() if "heading" in batch.schema.names else [None] * len(batch)
            for text, heading in zip(batch.column("text").to_pylist(), headings, strict=True):
                yield f"{heading}\n{text or ''}" if heading else text or ""

    def first_rows(self) -> NDArray[np.int64]:
        """`(documents,)` first row of each document.

        Raises:
            UsageError: numbers of documents are missing or altered, or the rows of one do not follow each other.
        """
        columns = [np.empty(0, np.int64)]
        for number in range(self._file.num_record_batches):
            column = self._file.get_batch(number).column("record")
            try:
                column.validate()
                columns.append(column.to_numpy())  # refuses nulls
            except pa.ArrowException as error:
                raise wrong_file(self._path, str(error)) from error
        records = np.concatenate(columns)
        if (np.diff(records, prepend=0) < 0).any():
            raise wrong_file(self._path, "its records do not ascend from 0")
        firsts: NDArray[np.int64] = np.flatnonzero(np.diff(records, prepend=-1))
        return firsts

    def _batch(self, number: int) -> pa.RecordBatch:
        """Batch with checked offsets and UTF-8 texts."""
        if number not in self._checked:
            batch = self._file.get_batch(number)
            try:
                batch.validate(full=True)  # offsets beyond the file would end the process
            except pa.ArrowException as error:
                raise wrong_file(self._path, str(error)) from error
            self._checked[number] = batch
        return self._checked[number]


# Numbers that are cast at once stay in the processor's cache, and BLAS multiplies so few without threads, which on a
# busy machine wait for each other longer than they compute.
_CAST_VALUES = 2**18


class StoredVectors:
    """Mapped vectors `(rows, size)` of an .npy file: float32 of length 1, or int8, of which the direction counts.

    int8 vectors are compared with queries that are not rounded, so a search computes their cosines to float32.

    Raises:
        UsageError: the file is cut off, altered, or of another shape or type, or a number is not finite.
    """

    def __init__(self, path: Path, rows: int, size: int, dtype: VectorType) -> None:
        self._vectors = mapped(path, rows, size, dtype)
        rows_at_once = CHUNK_ROWS if dtype == "float32" else max(1, _CAST_VALUES // size)
        self._chunks = [slice(start, start + rows_at_once) for start in range(0, rows, rows_at_once)]
        self._lengths: NDArray[np.float32] | None = None
        if dtype == "int8":
            self._lengths = np.zeros(rows, np.float32)
            for part in self._chunks:
                chunk = self._vectors[part].astype(np.float32)
                self._lengths[part] = np.sqrt(np.einsum("ij,ij->i", chunk, chunk)).clip(1)  # a null row stays null
        # in chunks: the answers for all numbers would take a byte each
        elif not all(np.isfinite(self._vectors[part]).all() for part in self._chunks):
            raise UsageError(f"{path} holds numbers that are not finite; build the index again")

    def cosines(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        """`(queries, rows)` cosines of queries `(queries, size)` of length 1."""
        if self._lengths is None:
            whole: NDArray[np.float32] = queries @ self._vectors.T
            return whole
        products = np.empty((len(queries), len(self._vectors)), np.float32)
        for part in self._chunks:  # a whole copy in float32 would be larger than the index
            products[:, part] = queries @ self._vectors[part].astype(np.float32).T
        return products / self._lengths


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

    score: float
    """Cosine, plus weight times lexical score in a hybrid index."""
    cosine: float
    """In [-1, 1]."""
    lexical: float | None
    """In [0, 1]; None in an index without words."""


class SearchIndex:
    """Index in a folder; opening it runs no code from the folder, and altered files are refused.

    `facts` are given while the index is being built; otherwise they are read and the files are compared with them.

    Raises:
        UsageError: the folder holds no index, or one that is incomplete, altered, or of another version.
    """

    def __init__(self, folder: Path, facts: IndexFacts | None = None) -> None:
        self.facts = facts or _checked_facts(folder)
        self._texts = StoredTexts(folder / TEXTS, self.facts.rows, self.facts.passages)
        self._firsts = self._texts.first_rows() if self.facts.passages else np.arange(self.facts.rows)
        self._vectors = StoredVectors(folder / VECTORS, self.facts.rows, self.facts.size, self.facts.dtype)
        hybrid = self.facts.hybrid
        self._words = StoredWords(folder, self.facts.rows, hybrid.kind) if hybrid else None
        self.weight = hybrid.weight if hybrid else 0.0
        """Weight of the words; 0 without words."""

    def check(self, encoder: SentenceEncoder) -> None:
        """Check that an encoder made this index.

        Raises:
            UsageError: another encoder made the index.
        """
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
        vector: NDArray[np.float32] = shaped(in_role(encoder, "query").encode([whole]), shape)[0].astype(np.float32)
        return vector

    def hits(self, vector: NDArray[np.float32], top: int, query: str) -> list[Hit]:
        """Texts best for a vector `(size,)` of length 1 and, in a hybrid index, for the words of a query; best first.

        Raises:
            UsageError: the vector is null, and no text has a word of the query.
        """
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
        best: NDArray[np.float32] = np.maximum.reduceat(scores, self._firsts) if len(scores) else scores
        return best

    def parts(self, vector: NDArray[np.float32], query: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and lexical scores, each `(rows,)`, of a query's vector `(size,)` and its words; 0 without words."""
        cosines = self._vectors.cosines(vector[None])[0]
        return cosines, np.zeros_like(cosines) if self._words is None else self._words.scores(query)

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
        model: str | None = None,
        weight: float | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if weight is not None and not 0 <= weight <= 100:
            raise UsageError(f"--weight {weight:g}: must be a number from 0 to 100")
        super().__init__(expand(str(index)))
        if weight is not None:
            if self.facts.hybrid is None:
                raise UsageError(f"--weight {weight:g}: the index has no words; build it again with `--hybrid`")
            self.weight = weight
        if model and (problem := unloadable(model)):
            raise EncoderError(problem)
        from declutr.encoders.loading import encoder_of_index  # loads torch, which no problem of the index waits for

        self._encoder = encoder_of_index(self.facts.choice, model, trust_remote_code=trust_remote_code)
        self.check(self._encoder)
        self._lock = threading.Lock()

    def search(self, query: str, top: int = 10) -> list[Hit]:
        """The best `top` texts for a query, best first; of an index of passages the best passage of each text.

        Raises:
            UsageError: the index or the query is empty, no word of it is known, or `top` is below 1.
        """
        if top < 1:
            raise UsageError(f"top = {top}: must be at least 1")
        if not query.strip():
            raise UsageError("the query is empty; give at least one word")
        if not self.facts.rows:
            raise UsageError(NO_TEXT)
        with self._lock:  # the encoder sets the number of torch's threads, which all threads share
            return self.hits(self.embed(self._encoder, query), top, query)


def search(index: str | PathLike[str], query: str, top: int = 10, **settings: Any) -> list[Hit]:
    """Search an index once; `Searcher` opens it for many queries, and has the settings and errors."""
    return Searcher(index, **settings).search(query, top)
