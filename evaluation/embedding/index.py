"""Index of embeddings: a folder with the vectors or their graphs, the texts, and the encoder that queries need.

Similarity is the cosine of vectors scaled to length 1. Up to `EXACT_ROWS`, a search compares every vector. Above, it
follows graphs (evaluation/embedding/graphs.py), which find nearly all nearest vectors in a fraction of the time.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from declutr.common.config import Strict, first_problem
from declutr.common.console.logs import bar
from declutr.common.storage import atomic_folder, hash_file, hash_json, write_json
from declutr.evaluation.embedding.config import EmbedConfig, EmbedError, Shape
from declutr.evaluation.embedding.graphs import Graphs, write_graphs
from declutr.evaluation.embedding.output import (
    CHUNK_ROWS,
    SCHEMA,
    Stored,
    StoredTexts,
    read_note,
    stored_vectors,
    unit_vectors,
    write_npy_header,
)
from declutr.evaluation.embedding.units import corpus_of, identify, keyed, plan, shaped
from declutr.evaluation.encoders.protocol import EncoderChoice, SentenceEncoder
from declutr.pipeline.job.units import Unit, plan_units, read_unit
from declutr.pipeline.readers.corpus import Document

EXACT_ROWS = 20_000
INDEX = "index.json"
_VECTORS, _TEXTS = "vectors.npy", "texts.arrow"
_FILE = re.compile(r"[a-z0-9-]+\.[a-z]+")
NO_WORD = "the encoder knows no word of the query, so its embedding is null and nothing is near it"

Kind = Literal["exact", "graph"]


class IndexFacts(Strict):
    """Facts about an index, stored in it."""

    version: Literal[3] = 3
    kind: Kind
    rows: int
    choice: EncoderChoice
    """The encoder that made the embeddings."""
    shape: Shape
    size: int
    fingerprint: str
    files: dict[str, str]
    """SHA-256 of each file."""


@dataclass(frozen=True)
class Hit(Stored):
    """A text that was found, and its cosine in [-1, 1]."""

    score: float


def build_index(
    embeddings: Path, output: Path, kind: Kind | None = None, source_field: str | None = None
) -> IndexFacts:
    """Build an index from a file of `declutr embed` and the texts of its inputs.

    Without a kind, it is exact up to `EXACT_ROWS` embeddings, and has graphs above. `source_field` is the key or column
    with the origin of a text; if None or missing in a record, the file is the origin.

    Raises:
        EmbedError: the note is missing, or the inputs have changed since.
        FileExistsError: `output` exists.
    """
    note = read_note(embeddings)
    config = note.config.model_copy(update={"output": embeddings.absolute()})
    units = plan(config)
    if note.job != hash_json(identify(config, units, note.fingerprint)):
        raise EmbedError(f"{embeddings}: its inputs {', '.join(config.inputs)} have changed since; embed them again")
    if source_field and (problems := plan_units(corpus_of(config, source_field), 1)[1]):
        raise EmbedError("\n".join(problem.replace("corpus.text_field", "--source-field") for problem in problems))
    kind = kind or ("exact" if note.rows <= EXACT_ROWS else "graph")
    with atomic_folder(output) as aside:
        if _write_texts(aside / _TEXTS, config, source_field) != note.rows:
            raise EmbedError(
                f"{embeddings}: its inputs have another number of texts than it has embeddings; embed again"
            )
        if kind == "exact":
            with (aside / _VECTORS).open("wb") as stream:
                write_npy_header(stream, (note.rows, note.size), np.float32)
                for chunk in unit_vectors(embeddings, note):
                    stream.write(chunk.tobytes())
        else:
            with bar(total=note.rows, unit="text", desc="index") as shown:
                write_graphs(aside, note.size, unit_vectors(embeddings, note), shown.update)
        facts = IndexFacts(
            kind=kind,
            rows=note.rows,
            choice=config.choice,
            shape=config.shape,
            size=note.size,
            fingerprint=note.fingerprint,
            files={path.name: hash_file(path) for path in sorted(aside.iterdir())},
        )
        write_json(aside / INDEX, facts.model_dump(mode="json"))
    return facts


class SearchIndex:
    """Index in a folder; opening it runs no code from the folder, and altered files are refused.

    Raises:
        EmbedError: the folder holds no index, or one that is incomplete, altered, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            raise EmbedError(f"{folder} is not an index; make one with `declutr index EMBEDDINGS --output FOLDER`")
        try:
            self.facts = IndexFacts.model_validate_json((folder / INDEX).read_bytes())
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else first_problem(error, IndexFacts)
            raise EmbedError(
                f"{folder / INDEX} is not an index of this version of `declutr index` ({why}); build the index again"
            ) from error
        for name, digest in self.facts.files.items():
            if not _FILE.fullmatch(name) or not (folder / name).is_file() or hash_file(folder / name) != digest:
                raise EmbedError(f"{folder}: {name} is missing or altered; build the index again")
        self._texts = StoredTexts(folder / _TEXTS, self.facts.rows)
        if self.facts.kind == "exact":
            self._vectors = stored_vectors(folder / _VECTORS, self.facts.rows, self.facts.size)
        else:
            graphs = sorted(name for name in self.facts.files if name.startswith("graph-"))
            self._graphs = Graphs([folder / name for name in graphs], self.facts.size)
            if len(self._graphs) != self.facts.rows:
                raise EmbedError(f"{folder}: its graphs hold {len(self._graphs):,} rows, not {self.facts.rows:,}")

    def search(self, encoder: SentenceEncoder, query: str, top: int = 10) -> list[Hit]:
        """Find the nearest texts, nearest first.

        Raises:
            EmbedError: the encoder did not make the index, or knows no word of the query.
        """
        self.check(encoder)
        vector = self.embed(encoder, query)
        if not vector.any():
            raise EmbedError(NO_WORD)
        return self.hits(vector, top)

    def check(self, encoder: SentenceEncoder) -> None:
        """Check that an encoder made this index.

        Raises:
            EmbedError: another encoder made the index.
        """
        if encoder.fingerprint != self.facts.fingerprint:
            raise EmbedError(
                f"the index was made with {self.facts.choice.model} ({self.facts.fingerprint[:12]}); {encoder.name} "
                f"({encoder.fingerprint[:12]}) gives different vectors; use the encoder of the index, or build it again"
            )

    def embed(self, encoder: SentenceEncoder, query: str) -> NDArray[np.float32]:
        """Vector of a query, `(size,)`, of length 1; a null vector stays null."""
        shape = self.facts.shape.model_copy(update={"normalise": True})
        vector: NDArray[np.float32] = shaped(encoder.encode([query]), shape)[0].astype(np.float32)
        return vector

    def hits(self, vector: NDArray[np.float32], top: int) -> list[Hit]:
        """Texts nearest to a vector `(size,)` of length 1, nearest first."""
        rows, scores = (found[0].tolist() for found in self.nearest(vector[None], top))
        return [Hit(**vars(text), score=score) for text, score in zip(self.texts(rows), scores, strict=True)]

    def nearest(self, queries: NDArray[np.float32], top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and cosines, each `(queries, top)`, nearest first; all rows if the index holds fewer.

        `queries` is `(queries, size)`, of length 1.
        """
        top = min(top, self.facts.rows)
        if not top:
            return np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
        if self.facts.kind == "graph":
            return self._graphs.nearest(queries, top)
        scores = queries @ self._vectors.T
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        return rows, np.take_along_axis(scores, rows, axis=1)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        if self.facts.kind == "exact":
            return np.asarray(self._vectors[np.asarray(rows, np.int64)])
        return self._graphs.vectors(rows)

    def texts(self, rows: Sequence[int]) -> list[Stored]:
        """Stored texts of these rows."""
        return [self._texts.at(row) for row in rows]


def _write_texts(path: Path, config: EmbedConfig, source_field: str | None) -> int:
    """Write texts, ids and sources in the order of the embeddings; return their number."""
    rows: list[dict[str, str | None]] = []
    total = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for unit in plan(config):
            records = keyed(unit, read_unit(unit, corpus_of(config, config.text_field)), config)
            for (record, key), source in zip(records, _sources(unit, config, source_field), strict=False):
                if source and (source.source, source.offset) != (record.source, record.offset):
                    raise EmbedError(f"{record.source} at {record.offset}: cannot pair texts with {source_field}")
                if isinstance(record, Document) and (key is None or isinstance(key, Document)):
                    text, origin = record.text.removesuffix("\r"), source.text if source else record.source
                    rows.append({"text": text, "id": key.text if key else None, "source": origin})
                    total += 1
                    if len(rows) == CHUNK_ROWS:
                        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                        rows.clear()
        if rows:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    return total


def _sources(unit: Unit, config: EmbedConfig, field: str | None) -> Iterator[Document | None]:
    """Value of that field for each record of a unit, or None."""
    records = read_unit(unit, corpus_of(config, field)) if field else itertools.repeat(None)
    return (record if isinstance(record, Document) and record.text else None for record in records)
