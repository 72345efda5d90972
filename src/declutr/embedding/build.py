"""`declutr index`: an index, and a map, from a file of `declutr embed`; written to a temporary folder, then renamed.

The map, for Embedding Atlas, has texts, vectors, and places in the plane in which the vectors differ most.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.console.logs import get_logger
from declutr.common.errors import UsageError
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import atomic_file, atomic_folder, hash_file, hash_json, write_json
from declutr.embedding import INDEX
from declutr.embedding.index import NO_TEXT, TEXTS, VECTORS, Hybrid, IndexFacts, SearchIndex, check_weight
from declutr.embedding.job import read_again
from declutr.embedding.note import Note, finite_vectors, read_note, unit_vectors
from declutr.embedding.pieces import write_npy_header
from declutr.embedding.postings import write_words
from declutr.embedding.stored import PASSAGE_SCHEMA, SCHEMA, StoredTexts
from declutr.embedding.units import (
    CHUNK_ROWS,
    PLACES,
    Coverage,
    EmbedConfig,
    Shape,
    VectorType,
    corpus_of,
    identify,
    keyed,
    plan,
    shaped,
)
from declutr.embedding.weights import WeightChoice, choose_weight
from declutr.encoders.protocol import unit_rows
from declutr.evaluation.retrieval.lexicon import LexicalKind
from declutr.evaluation.retrieval.pairs import read_pairs
from declutr.pipeline.config import found_again
from declutr.pipeline.job.units import Unit, UnitReader, plan_units
from declutr.pipeline.readers.corpus import Document
from declutr.trainer.data.plan import permute

DEFAULT_WEIGHT = 1.0
F64 = NDArray[np.float64]


class Built(NamedTuple):
    """A new index."""

    facts: IndexFacts
    choice: WeightChoice | None  # the weight of the words that pairs have chosen


def index(
    embeddings: str | PathLike[str],
    output: str | PathLike[str],
    *,
    source_field: str | None = None,
    dtype: VectorType | None = None,
    hybrid: bool = False,
    lexical: LexicalKind | None = None,
    weight: float | None = None,
    pairs: str | PathLike[str] | None = None,
    model: str | None = None,
    parquet: str | PathLike[str] | None = None,
    open_addresses: bool = False,
    trust_remote_code: bool = False,
) -> Built:
    """Build an index for `search` from a file of `embed` and the texts of its inputs.

    Args:
        embeddings: the file, with its note next to it.
        output: folder to create.
        source_field: key or column with the origin of a text; its file if None.
        dtype: type of the stored vectors; None: int8 if the embeddings are, else float32.
        hybrid: store the words too: score = cosine + weight * words.
        lexical: score of the words, idf if None.
        weight: of the words, 1 if None.
        pairs: file of queries with the text or id that they should find: half of them choose the weight.
        model: the encoder that `pairs` need, if it has moved since.
        parquet: file to write too: texts, vectors and a map of them.
        open_addresses: read inputs at addresses in the file's note.
        trust_remote_code: run Python code that comes with the encoder.

    Raises:
        UsageError: an option or a file cannot be used, `output` exists, or the inputs have changed since.
        DataError: the pairs cannot be used.
        EncoderError: the encoder cannot be loaded.
    """
    given = {"lexical": lexical, "weight": weight, "pairs": pairs}
    if needless := [f"--{name}" for name, value in given.items() if value is not None and not hybrid]:
        raise UsageError(f"{', '.join(needless)}: for hybrid indexes; add --hybrid")
    if pairs is not None and weight is not None:
        raise UsageError(f"--weight {weight:g}: cannot be used with --pairs, which chooses the weight; omit one")
    check_weight(weight)
    switch = Literal[True, False]  # "no" would be true
    typed = ("dtype", dtype, VectorType), ("lexical", lexical, LexicalKind), ("hybrid", hybrid, switch)
    for option, value, kinds in (*typed, ("open-addresses", open_addresses, switch)):
        if value is not None and value not in get_args(kinds):
            raise UsageError(f"--{option} {value}: must be {' or '.join(map(str, get_args(kinds)))}")
    if not isinstance(source_field, str | None):
        raise UsageError(f"--source-field {source_field}: must be a text")
    file, folder, encoder = expand(embeddings, "embeddings"), expand(output, "output"), None
    map_file, choice = None if parquet is None else expand(parquet, "parquet"), None
    note = read_note(file)
    if folder.exists():
        raise UsageError(f"--output {folder}: exists already; name another folder")
    for option, path in (("output", folder), ("parquet", map_file)):
        if path and (problem := folder_problem(path.absolute().parent)):
            raise UsageError(f"--{option} {path}: {problem}")
    for problem in found_again(str(folder.absolute()), note.config.inputs, [TEXTS]):
        raise UsageError(f"--output {folder}: {problem}")
    if pairs is not None:
        read_pairs(expand(pairs, "pairs"))  # its problems need not wait for the encoder
        from declutr.encoders.loading import encoder_of_index  # loads torch

        encoder = encoder_of_index(note.config.choice, model, trust_remote_code=trust_remote_code)
    config = note.config.model_copy(update={"output": file.absolute()})  # the file may have moved
    if not open_addresses and (far := [path for path in config.inputs if "://" in path]):
        # A request would carry the credentials of this user.
        raise UsageError(
            f"{file}: its note names {far[0]}, which is not opened, because it may come from someone else; if you "
            "trust it: --open-addresses"
        )
    try:
        units = plan(config)  # texts are read again, and must be those that were embedded
    except UsageError as error:
        raise UsageError(f"{file}: its inputs cannot be read again: {error}; put them back, or embed again") from error
    if note.job != hash_json(identify(config, units, note.fingerprint, note.precision)):
        raise UsageError(f"{file}: its inputs {', '.join(config.inputs)} have changed since; embed them again")
    lacks = plan_units(corpus_of(config, source_field), 1)[1] if source_field else []
    if lacks := [problem for problem in lacks if ": no key" not in problem]:  # of lines, where it may be optional
        raise UsageError("\n".join(problem.replace("corpus.text_field", "--source-field") for problem in lacks))
    dtype = dtype or ("int8" if config.shape.dtype == "int8" else "float32")
    if map_file:
        _check_map_file(map_file, folder, config, note.rows)
    with _as_usage(folder), atomic_folder(folder) as aside:
        places = _places(file) if config.passages else None
        if _write_texts(aside / TEXTS, units, config, source_field, places) != note.rows:
            raise UsageError(f"{file}: its inputs have another number of texts than it has embeddings; embed again")
        with (aside / VECTORS).open("wb") as stream:
            write_npy_header(stream, (note.rows, note.size), dtype)
            for chunk in unit_vectors(file, note):
                stream.write(shaped(chunk, Shape(dtype=dtype)).tobytes())
        lexicon = None
        if hybrid:
            kind: LexicalKind = lexical or "idf"
            words = write_words(aside, StoredTexts(aside / TEXTS, note.rows, config.passages), kind)
            lexicon = Hybrid(kind=kind, weight=DEFAULT_WEIGHT if weight is None else weight, words=words)
        facts = IndexFacts(
            rows=note.rows,
            choice=config.choice,
            shape=config.shape,
            size=note.size,
            fingerprint=note.fingerprint,
            files={path.name: hash_file(path) for path in sorted(aside.iterdir())},  # checked before a search opens any
            dtype=dtype,
            hybrid=lexicon,
            passages=config.passages,
            **note.model_dump(include={*Coverage.model_fields}),
        )
        if lexicon and encoder and pairs is not None:
            choice = choose_weight(SearchIndex(aside, facts), encoder, expand(pairs, "pairs"))
            chosen = {"weight": choice.weight, "chosen_on": choice.development}
            facts = facts.model_copy(update={"hybrid": lexicon.model_copy(update=chosen)})
        write_json(aside / INDEX, facts.model_dump(mode="json"))
        if map_file:
            with atomic_file(map_file) as map_aside:
                write_map(map_aside, aside / TEXTS, file, note)
    return Built(facts, choice)


@contextmanager
def _as_usage(folder: Path) -> Iterator[None]:
    """An error of storage names a temporary file; that of `index` names the folder of the user."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror or error}; nothing was written") from error


def _check_map_file(map_file: Path, output: Path, config: EmbedConfig, rows: int) -> None:
    """Raise UsageError if the map has no text, or its file another name than .parquet, or a place that is in use."""
    if map_file.suffix != ".parquet":
        raise UsageError(f"--parquet {map_file}: must end in .parquet")
    if map_file.exists():
        raise UsageError(f"--parquet {map_file}: exists already; name another file")
    if map_file.resolve().is_relative_to(output.resolve()):
        raise UsageError(f"--parquet {map_file}: is in the folder of the index; name a file elsewhere")
    if problem := read_again(config, [map_file]):
        raise UsageError(f"--parquet {map_file}: {problem}")
    if not rows:
        raise UsageError(f"--parquet {map_file}: {NO_TEXT}; omit it")


def _places(embeddings: Path) -> Iterator[dict[str, Any]]:
    """Record, place and headings of each passage of a file of embeddings."""
    try:
        with pq.ParquetFile(embeddings) as file:
            kinds = dict([("row", pa.int64()), *PLACES])
            if any(name not in file.schema_arrow.names for name in kinds):
                raise UsageError(f"{embeddings}: lacks the places of its passages; embed again")
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(kinds)):
                yield from batch.cast(pa.schema(kinds)).to_pylist()
    except pa.ArrowException as error:
        raise UsageError(f"{embeddings}: cannot read the places of its passages ({error}); embed again") from error


def _write_texts(
    path: Path,
    units: Sequence[Unit],
    config: EmbedConfig,
    source_field: str | None,
    places: Iterator[dict[str, Any]] | None,
) -> int:
    """Write texts or passages, ids and sources in the order of the embeddings; return their number."""
    rows: list[dict[str, int | str | None]] = []
    total, number, in_file = 0, itertools.count(), Counter[str]()
    texts = named_texts = 0
    schema = PASSAGE_SCHEMA if places else SCHEMA
    place = next(places, None) if places else None
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for unit in units:
            records = keyed(unit, UnitReader(unit, corpus_of(config, config.text_field)), config)
            fields = UnitReader(unit, corpus_of(config, source_field)) if source_field else itertools.repeat(None)
            for (record, key), field in zip(records, fields, strict=False):  # `itertools.repeat` has no end
                record_number, source = next(number), field if isinstance(field, Document) and field.text else None
                in_file[record.source] += 1
                if source and (source.source, source.offset) != (record.source, record.offset):
                    raise UsageError(f"{record.source} at {record.offset}: cannot pair texts with {source_field}")
                if isinstance(record, Document):
                    # without the CR of a line that ends in CR LF, as `embed_unit` counts characters
                    text = record.text.removesuffix("\r")
                    origin = source.text if source and source.text != record.text else None
                    row: dict[str, int | str | None] = {"record": record_number, "text": text, "id": key}
                    # of a format without fields, the field is the text
                    row |= {"source": origin or record.source, "number": None if origin else in_file[record.source]}
                    texts, named_texts = texts + 1, named_texts + bool(origin)
                    rows += [] if places else [row]
                    while places and place and place["row"] == record_number:
                        part = {"text": text[place["start"] : place["end"]], "line": place["line"]}
                        rows.append(row | part | {"heading": place["heading"]})
                        place = next(places, None)
                while len(rows) >= CHUNK_ROWS:
                    writer.write_batch(pa.RecordBatch.from_pylist(rows[:CHUNK_ROWS], schema=schema))
                    del rows[:CHUNK_ROWS]
                    total += CHUNK_ROWS
        if rows:
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    if source_field and texts > named_texts:
        lack = f"--source-field {source_field}: {texts - named_texts:,} of {texts:,} texts have none of that name"
        if not named_texts:  # another name, or a format without fields
            raise UsageError(f"{lack}; omit it, or name another")
        get_logger().warning("%s; their file is their source", lack)
    return total + len(rows)


PLANE_ROWS = 5_000  # so that a map takes seconds
"""Texts that fit the plane; all are placed on it."""
SHARE = b"share of the variance"  # key of the file's metadata: the share of the variance within the plane, in [0, 1]
_LEAST_SHARE = 1e-12  # of the largest eigenvalue


def fit_plane(vectors: NDArray[np.float32]) -> tuple[F64, F64, float]:
    """The plane in which vectors `(n, size)` differ most: their first two principal components (Pearson, 1901).

    With mean m and covariance C = 1/n sum_i (x_i - m)(x_i - m)^T, a vector x of length 1 is placed at
    (u_1, u_2)^T (x - m), where u_1 and u_2 are the eigenvectors of C with the largest eigenvalues. Unlike the places of
    UMAP or t-SNE, these depend on no random start, and each follows from its vector alone, so that batches are placed
    one after the other.

    Returns:
        The mean `(size,)`; the axes `(size, 2)`, the second null if the vectors lie on a line; and the share of the
        variance within the plane, 1 if there is none.
    """
    mean = vectors.mean(axis=0, dtype=np.float64)
    _, singular, directions = np.linalg.svd(vectors - mean, full_matrices=False)  # the full ones would be size x size
    variances, axes = singular**2, np.zeros((vectors.shape[1], 2))
    real = variances[:2] > _LEAST_SHARE * variances[0]  # others are rounding
    axes[:, : len(real)] = directions[:2].T * real
    # The sign of an eigenvector is arbitrary: make the number of largest magnitude positive.
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    total = float(variances.sum())
    # at most 1, because two sums round differently
    return mean, axes, min(1.0, float(variances[:2].sum()) / total) if total else 1.0


def sample_rows(num_rows: int) -> NDArray[np.int64]:
    """Ascending numbers below `num_rows`: `PLANE_ROWS` of them, always the same ones, or all if there are fewer."""
    drawn = np.arange(min(num_rows, PLANE_ROWS))
    if num_rows > PLANE_ROWS:
        drawn = np.sort(permute(seeding.key_for(0, "map"), np.zeros_like(drawn), drawn, num_rows))
    return drawn


def write_map(path: Path, texts: Path, embeddings: Path, note: Note) -> None:
    """Write the map of a file of at least one embedding for Embedding Atlas, a batch at a time.

    Columns: text, id, source, vector (as in the file of embeddings, of its type), x, y (float32). `texts` is the file
    of the index, with a row for each embedding.
    """
    rows, parts, start = sample_rows(note.rows), [], 0
    for chunk in unit_vectors(embeddings, note):  # a batch of Parquet may be shorter than the others: rows are counted
        parts.append(chunk[rows[(rows >= start) & (rows < start + len(chunk))] - start])
        start += len(chunk)
    mean, axes, share_of_plane = fit_plane(np.concatenate(parts))
    with pa.memory_map(str(texts)) as source:
        table = pa.ipc.open_file(source).read_all()  # mapped, so nothing is read yet
        vector = pa.list_(pa.from_numpy_dtype(note.config.shape.dtype), note.size)
        fields = [*(table.schema.field(name) for name in ("text", "id", "source")), pa.field("vector", vector)]
        schema = pa.schema([*fields, ("x", pa.float32()), ("y", pa.float32())], {SHARE: str(round(share_of_plane, 6))})
        start = 0
        with pq.ParquetWriter(path, schema) as writer:
            for chunk in finite_vectors(embeddings, note):
                x, y = ((unit_rows(chunk.astype(np.float32)) - mean) @ axes).astype(np.float32).T
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(chunk)), note.size)
                columns = table.slice(start, len(chunk)).select(["text", "id", "source"]).columns
                writer.write_table(pa.Table.from_arrays([*columns, vectors, pa.array(x), pa.array(y)], schema=schema))
                start += len(chunk)
