"""Building of an index from a file of `declutr embed`: written to a temporary folder, then renamed."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.storage import atomic_folder, hash_file, hash_json, write_json
from declutr.embedding.config import EmbedConfig, EmbedError, Shape, VectorType
from declutr.embedding.index import INDEX, SCHEMA, TEXTS, VECTORS, Hybrid, IndexFacts, SearchIndex, StoredTexts
from declutr.embedding.lexical import write_words
from declutr.embedding.output import CHUNK_ROWS, read_note, unit_vectors, write_npy_header
from declutr.embedding.units import corpus_of, identify, keyed, plan, shaped
from declutr.embedding.weight import WeightChoice
from declutr.evaluation.retrieval.lexicon import LexicalKind
from declutr.pipeline.job.units import Unit, plan_units, read_unit
from declutr.pipeline.readers.corpus import Document

DEFAULT_WEIGHT = 1.0


def build_index(
    embeddings: Path,
    output: Path,
    source_field: str | None = None,
    dtype: VectorType | None = None,
    lexical: LexicalKind | None = None,
    weight: float | Callable[[SearchIndex], WeightChoice] = DEFAULT_WEIGHT,
    open_addresses: bool = False,
) -> IndexFacts:
    """Build an index from a file of `declutr embed` and the texts of its inputs.

    Args:
        embeddings: the file.
        output: folder to create.
        source_field: key or column with the origin of a text; if None or missing in a record, the file is the origin.
        dtype: type of the stored vectors; None: int8 if the embeddings are, else float32.
        lexical: scores of words for a hybrid index; None: vectors alone.
        weight: of the words, or a function that chooses it with the index.
        open_addresses: read inputs at addresses, which the file's note names.

    Raises:
        EmbedError: the note is missing, or the inputs have changed since.
        FileExistsError: `output` exists.
    """
    note = read_note(embeddings)
    config = note.config.model_copy(update={"output": embeddings.absolute()})
    if not open_addresses and (far := [path for path in config.inputs if "://" in path]):
        raise EmbedError(
            f"{embeddings}: its note names {far[0]}, which is not opened, because it may come from someone else; if "
            "you trust it: --open-addresses"
        )
    units = plan(config)
    precision = note.precision or config.choice.precision
    if note.job != hash_json(identify(config, units, note.fingerprint, precision)):
        raise EmbedError(f"{embeddings}: its inputs {', '.join(config.inputs)} have changed since; embed them again")
    if source_field and (problems := plan_units(corpus_of(config, source_field), 1)[1]):
        raise EmbedError("\n".join(problem.replace("corpus.text_field", "--source-field") for problem in problems))
    is_int8 = config.shape.dtype == "int8"
    dtype = dtype or ("int8" if is_int8 else "float32")
    with atomic_folder(output) as aside:
        if _write_texts(aside / TEXTS, units, config, source_field) != note.rows:
            raise EmbedError(
                f"{embeddings}: its inputs have another number of texts than it has embeddings; embed again"
            )
        with (aside / VECTORS).open("wb") as stream:
            write_npy_header(stream, (note.rows, note.size), dtype)
            for chunk in unit_vectors(embeddings, note):
                stream.write(shaped(chunk, Shape(dtype=dtype)).tobytes())
        hybrid = None
        if lexical:
            words = write_words(aside, StoredTexts(aside / TEXTS, note.rows), lexical)
            hybrid = Hybrid(kind=lexical, weight=DEFAULT_WEIGHT if callable(weight) else weight, words=words)
        facts = IndexFacts(
            rows=note.rows,
            choice=config.choice,
            shape=config.shape,
            size=note.size,
            fingerprint=note.fingerprint,
            files={path.name: hash_file(path) for path in sorted(aside.iterdir())},
            dtype=dtype,
            hybrid=hybrid,
        )
        if dtype == "int8" and not is_int8 and note.rows > 1:
            recall = measure_recall(SearchIndex(aside, facts), lambda: unit_vectors(embeddings, note))
            facts = facts.model_copy(update={"recall": recall})
        if hybrid and callable(weight):
            choice = weight(SearchIndex(aside, facts))
            chosen = {"weight": choice.weight, "chosen_on": choice.development}
            facts = facts.model_copy(update={"hybrid": hybrid.model_copy(update=chosen)})
        write_json(aside / INDEX, facts.model_dump(mode="json"))
    return facts


_RECALL_QUERIES, _RECALL_TOP = 100, 10
_RECALL_TOGETHER = 10  # an exact search holds a score for each of them and each text
_SAME = 1e-6


def measure_recall(index: SearchIndex, chunks: Callable[[], Iterator[NDArray[np.float32]]]) -> float:
    """Share of the ten texts nearest to a text by float32 that a search of the index finds, for 100 texts of it.

    A text that is as near as the tenth counts as found, because copies of one text have the same cosine.

    Args:
        index: with at least two rows.
        chunks: reads the vectors of length 1 from which it was made.
    """
    count = index.facts.rows
    rows = np.unique(np.linspace(0, count - 1, _RECALL_QUERIES).astype(np.int64))
    top = min(_RECALL_TOP, count - 1)
    queries = np.concatenate([chunk[_inside(rows, start, chunk)] for start, chunk in _numbered(chunks())])
    parts = range(0, len(queries), _RECALL_TOGETHER)
    found = np.concatenate([index.nearest(queries[at : at + _RECALL_TOGETHER], top + 1)[0] for at in parts])
    nearest = np.full((len(rows), top), -np.inf, np.float32)
    cosines_found = np.full(found.shape, -np.inf, np.float32)
    for start, chunk in _numbered(chunks()):
        cosines = queries @ chunk.T
        own = (rows >= start) & (rows < start + len(chunk))
        cosines[own, rows[own] - start] = -np.inf  # a text finds itself
        nearest = np.partition(np.concatenate([nearest, cosines], axis=1), -top, axis=1)[:, -top:]
        query, place = np.nonzero((found >= start) & (found < start + len(chunk)))
        cosines_found[query, place] = cosines[query, found[query, place] - start]
    hits = (cosines_found >= nearest.min(axis=1, keepdims=True) - _SAME).sum(axis=1)
    return float(np.minimum(hits, top).mean() / top)


def _numbered(chunks: Iterator[NDArray[np.float32]]) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Chunks with the row of the first vector of each."""
    start = 0
    for chunk in chunks:
        yield start, chunk
        start += len(chunk)


def _inside(rows: NDArray[np.int64], start: int, chunk: NDArray[np.float32]) -> NDArray[np.int64]:
    """Places in a chunk of the rows that it has."""
    places: NDArray[np.int64] = rows[(rows >= start) & (rows < start + len(chunk))] - start
    return places


def _write_texts(path: Path, units: Sequence[Unit], config: EmbedConfig, source_field: str | None) -> int:
    """Write texts, ids and sources in the order of the embeddings; return their number."""
    rows: list[dict[str, int | str | None]] = []
    total, number = 0, itertools.count()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for unit in units:
            records = keyed(unit, read_unit(unit, corpus_of(config, config.text_field)), config)
            for (record, key), source in zip(records, _sources(unit, config, source_field), strict=False):
                record_number = next(number)
                if source and (source.source, source.offset) != (record.source, record.offset):
                    raise EmbedError(f"{record.source} at {record.offset}: cannot pair texts with {source_field}")
                if isinstance(record, Document) and (key is None or isinstance(key, Document)):
                    text, origin = record.text.removesuffix("\r"), source.text if source else record.source
                    named = {"id": key.text if key else None, "source": origin}
                    rows.append({"record": record_number, "text": text, **named})
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
