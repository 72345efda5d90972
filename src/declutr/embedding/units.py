"""Settings of `declutr embed`, and its units: texts to a whole file of embeddings, then a sidecar that marks it."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Precision, Strict, flat_keys
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import excerpt
from declutr.common.errors import UsageError
from declutr.common.storage import atomic_file, hash_json, write_text
from declutr.common.stores.address import is_remote
from declutr.embedding.passages import Cutter, Passage
from declutr.encoders.protocol import EncoderChoice, SentenceEncoder, encode_counted, unit_rows
from declutr.pipeline.job.units import Unit, UnitReader, check_unchanged, fit_units, hash_unit, with_file_states
from declutr.pipeline.readers.corpus import (
    DOCUMENT_SUFFIXES,
    NO_TEXT,
    SUFFIXES,
    Choice,
    Document,
    OrderedFiles,
    ReadFailure,
    Record,
    TextField,
    bare_suffix,
)
from declutr.pipeline.readers.skipped import Skipped, describe_skipped

VectorType = Literal["float32", "int8"]  # type of the vectors of an index


class Shape(Strict):
    """Postprocessing of an embedding, in this order: truncate, normalise, round."""

    # Keep only the first numbers, this many. They have length 1 again only with `normalise`.
    dimensions: int | None = Field(default=None, ge=1)
    normalise: bool = False  # Divide by the Euclidean length; a null vector stays null
    # int8: scaled so that the number of largest magnitude is 127, then rounded; only the direction is kept.
    dtype: Literal["float32", "float16", "int8"] = "float32"


class EmbedConfig(Strict):
    """Settings of one job."""

    choice: EncoderChoice
    inputs: list[str] = Field(min_length=1)  # files, folders and globs, as `prepare` takes them
    output: Path  # .npy: `(texts, size)`. .parquet: columns row, id if requested, embedding.
    text_field: TextField = "text"  # key or column of the text, or several, as `prepare` takes them
    id_field: str | None = None  # key or column of a text that identifies each row, written next to its embedding
    format: Choice = "auto"  # format of the inputs; auto detects it from name and content
    shape: Shape = Shape()
    # A row for each passage that the encoder reads whole, instead of one for the beginning of a text.
    passages: bool = False
    headings: bool = False  # put the headings above a passage before it
    skip_bad: bool = False  # skip and count records that cannot be read; otherwise the first such record stops the job
    # Input per unit of work in MiB; if not set, 1, and more for inputs above 4,096 units.
    unit_mib: float | None = Field(default=None, gt=0)
    # Ray workers; 0 uses this process. If not set: this process for small inputs, else all GPUs, else all CPUs.
    workers: int | None = Field(default=None, ge=0)


MAX_UNITS = 4096
CHUNK_ROWS = 4096  # embeddings that are read at once


def plan(config: EmbedConfig) -> list[Unit]:
    """Plan the pieces of the inputs, each a unit of one part, with the states of their files."""
    problems = []
    if config.output.suffix not in (".npy", ".parquet"):
        problems.append(f"--output {config.output}: must end in .npy or .parquet")
    if config.output.suffix == ".npy" and (config.id_field or config.skip_bad):
        problems.append("ids and skipped rows need an --output that ends in .parquet: .npy has row numbers only")
    if config.passages and config.output.suffix == ".npy":
        problems.append("--passages needs an --output that ends in .parquet, which has their places")
    if config.headings and not config.passages:
        problems.append("--headings: is for passages; add --passages")
    words = {"in corpus.paths": "as inputs", "corpus.paths": "input", "corpus.format": "--format"}
    words |= {"corpus.text_field": "--text-field", "no file;": "no file (texts in memory: declutr.load(MODEL).encode);"}

    def in_options(line: str) -> str:
        return re.sub("|".join(words), lambda match: words[match[0]], line)

    skipped = Skipped()
    corpus = corpus_of(config, config.text_field)
    _, units, unreadable = fit_units(corpus, config.unit_mib, skipped, least_mib=1, most_units=MAX_UNITS)
    if config.id_field and not unreadable and (unreadable := fit_units(corpus_of(config, config.id_field), 1)[2]):
        words |= {"corpus.text_field": "--id-field", ", or several to join": ""}
    problems += map(in_options, unreadable)
    if problems:
        raise UsageError("\n".join(problems))
    for line in describe_skipped(skipped.kinds()):
        get_logger().warning(in_options(line))
    return with_file_states([unit.model_copy(update={"parts": [part]}) for unit in units for part in unit.parts])


_ID_HINT = ". --id-field names a key or column of texts or whole numbers"
_FIELDLESS = ("text", "text_file", "wet", "document")


def check_records(config: EmbedConfig, units: list[Unit]) -> None:
    """Check that inputs have texts and the field of the ids, and that a JSONL file's first record can be embedded."""
    corpus = corpus_of(config, config.text_field)
    far = any(is_remote(part.path) for unit in units for part in unit.parts)  # not fetched before its work
    if not far and not any(True for unit in units for _ in UnitReader(unit, corpus)):
        raise UsageError(f"{excerpt(config.inputs)}: holds no texts")
    kinds = SUFFIXES | dict.fromkeys(DOCUMENT_SUFFIXES, "document")
    starts = [(unit, part) for unit in units for part in unit.parts if not part.start]
    for unit, part in starts:
        by_name = kinds.get(bare_suffix(part.source)) if config.format.startswith("auto") else config.format
        kind = by_name if part.format == "stream" else part.format
        if config.id_field and kind in _FIELDLESS:
            raise UsageError(f"--id-field {config.id_field}: {part.path} has no keys or columns; omit it")
        if kind == "jsonl" and not config.skip_bad and not is_remote(part.path):
            alone = unit.model_copy(update={"parts": [part]})
            pairs = keyed(alone, UnitReader(alone, corpus), config)
            if isinstance(record := next(pairs, (None, None))[0], ReadFailure):
                raise _refusal(record, unit, config.output)


def part_of(unit: Unit, source: str) -> int:
    """Number of the first part with a source, a file of the unit or a member of one."""
    return next(number for number, part in enumerate(unit.parts) if f"{source}!".startswith(f"{part.source}!"))


def path_of(unit: Unit, source: str) -> str:
    """Path or address of a source: another folder may have that name, too."""
    part = unit.parts[part_of(unit, source)]
    return part.path + source.removeprefix(part.source)


def _refusal(record: ReadFailure, unit: Unit, output: Path) -> UsageError:
    """The error of a record that cannot be read and is not to be skipped."""
    names = {NO_TEXT: "--text-field names the key or column of the text; ", "invalid_utf8": "write it in UTF-8; "}
    # another format may have no such record
    hint = "" if "corpus.format" in record.message else f". {names.get(record.reason, '')}--skip-bad skips such records"
    hint += " into an --output that ends in .parquet" if hint and output.suffix == ".npy" else ""
    message = f"{path_of(unit, record.source)} at {record.offset}: {record.reason}: {record.message}{hint}"
    return UsageError(message.replace("corpus.format", "--format"))


def identify(config: EmbedConfig, units: list[Unit], fingerprint: str, precision: Precision) -> list[str]:
    """SHA-256 for each piece of its input, the encoder with its precision, and the settings for its embeddings."""
    # Fingerprint and units stand for what is left out, or it decides no number.
    settings = config.model_dump(mode="json", exclude={"choice", "inputs", "output", "workers", "unit_mib", "skip_bad"})
    settings |= {"precision": precision, "fingerprint": fingerprint, "suffix": config.output.suffix}
    return [
        hash_json([settings, hash_unit(unit), unit.input_state.model_dump() if unit.input_state else None])
        for unit in units
    ]


def changes(before: EmbedConfig, now: EmbedConfig) -> str:
    """Settings with which an output was made and those of this job, where they decide more than which texts it has."""
    exclude = {"inputs", "output", "workers", "unit_mib"} | ({"skip_bad"} if now.skip_bad else set())
    old, new = (flat_keys(config.model_dump(mode="json", exclude=exclude)) for config in (before, now))
    return ", ".join(f"{key.rpartition('.')[2]} = {old[key]}, not {new[key]}" for key in new if old[key] != new[key])


MAX_TEXT_MIB = 512
_WINDOW_TEXTS = 8192  # embedded together, so that batches have texts of one length
_WINDOW_CHARACTERS = 8_000_000  # 8,192 long texts may not fit in memory


class Coverage(Strict):
    """Tokens of the texts and of the parts that were read, without special ones; 0 if the encoder reads any length."""

    texts_cut: int = 0  # texts, or passages, that were longer than the encoder reads
    tokens: int = 0  # tokens of all texts, in passages with their headings
    tokens_read: int = 0
    texts_empty: int = 0  # texts without a visible character

    def sentence(self) -> str:
        """The share that was read; empty if nothing was cut."""
        if not self.texts_cut:
            return ""
        share = 100 * self.tokens_read / self.tokens
        return f"{share:.1f}% of {self.tokens:,} tokens were read: {self.texts_cut:,} texts were cut"


class Piece(Coverage):
    """Counts of a piece's records."""

    read: int = 0  # records read, including those that could not be parsed
    written: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)  # records that could not be read, by reason
    lost: list[str] = Field(default_factory=list)  # files of which a part, or all, could not be read


class EmbeddingSidecar(Strict):
    """Counts of a unit's pieces, in the order of its rows."""

    unit: str
    identity: str  # SHA-256 of the unit's input and the job's settings
    num_bytes: int  # size of the file of embeddings
    pieces: list[Piece]


def corpus_of(config: EmbedConfig, field: str | list[str]) -> OrderedFiles:
    """Inputs as a corpus for the readers."""
    settings = {"kind": "files", "paths": config.inputs, "format": config.format, "text_field": field}
    others = {"max_document_mib": MAX_TEXT_MIB, "numbers": field != config.text_field}
    return OrderedFiles.model_validate(settings | others)


PLACES = [("start", pa.int64()), ("end", pa.int64()), ("line", pa.int64()), ("heading", pa.string())]
"""Columns with the fields of a `Passage`."""


def part_schema(size: int, config: EmbedConfig) -> pa.Schema:
    """Columns of a unit's file: row within the unit, id if requested, place and headings of a passage, embedding."""
    number = pa.from_numpy_dtype(config.shape.dtype)
    names = [("row", pa.int64()), *([("id", pa.string())] if config.id_field else [])]
    names += PLACES if config.passages else []
    return pa.schema([*names, ("embedding", pa.list_(number, config.shape.dimensions or size))])


_COUNTS, _READ, _EMPTY = ("written", "texts_cut", "tokens", "tokens_read", "read", "texts_empty"), 4, 5


def embed_unit(
    unit: Unit,
    folder: Path,
    config: EmbedConfig,
    identity: str,
    encoder: SentenceEncoder,
    report: Callable[[int, int], None] | None = None,
) -> EmbeddingSidecar:
    """Embed one unit to the folder of the parts. The bytes depend only on the unit, the encoder and the settings.

    `report` is called with the numbers of newly embedded texts and newly read input bytes.
    """
    schema = part_schema(encoder.size, config)
    cutter = Cutter(encoder, config.headings) if config.passages else None
    skipped, lost = [Counter[str]() for _ in unit.parts], [set[str]() for _ in unit.parts]
    counts = np.zeros((len(unit.parts), len(_COUNTS)), np.int64)
    seen_bytes = read = 0
    with atomic_file(folder / f"{unit.name}.parquet") as aside:
        reader = UnitReader(unit, corpus_of(config, config.text_field))
        with pq.ParquetWriter(aside, schema) as writer:
            for window in _windows(keyed(unit, reader, config)):
                rows, ids, texts, places = list[int](), list[str](), list[str](), list[Passage]()
                of_piece = list[int]()
                for record, key in window:
                    number = part_of(unit, record.source)
                    if isinstance(record, ReadFailure):
                        if not config.skip_bad:
                            raise _refusal(record, unit, config.output)
                        skipped[number][record.reason] += 1
                        lost[number] |= {path_of(unit, record.source)} if record.reason == "unreadable" else set()
                    else:
                        text = record.text.removesuffix("\r")  # of a line that ends in CR LF
                        counts[number, _EMPTY] += not text.strip()
                        passages = cutter.passages(text) if cutter else []
                        places += passages
                        texts += [passage.of(text) for passage in passages] if cutter else [text]
                        of_piece += [number] * (len(texts) - len(rows))
                        rows += [read] * (len(texts) - len(rows))
                        ids += [key or ""] * (len(texts) - len(ids))
                    counts[number, _READ] += 1
                    read += 1
                if rows:
                    values, finite, tokens = embed_distinct(encoder, texts, config.shape)
                    cut = tokens[:, 0] > tokens[:, 1]
                    np.add.at(counts[:, :_READ], of_piece, np.stack([np.ones_like(cut), cut, *tokens.T], axis=1))
                    if len(bad := np.flatnonzero(~finite)):
                        raise UsageError(
                            f"{unit.name}: the embedding of record {rows[bad[0]]:,} is not finite in "
                            f"{config.shape.dtype}; the encoder is broken, or --dtype float32 is needed"
                        )
                    columns = {
                        "row": pa.array(rows, pa.int64()),
                        "id": pa.array(ids, pa.string()),
                        **{name: pa.array([getattr(place, name) for place in places], kind) for name, kind in PLACES},
                        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]),
                    }
                    writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
                if report is not None:
                    report(len(texts), reader.bytes_read - seen_bytes)
                    seen_bytes = reader.bytes_read
        check_unchanged(unit)  # or the part may mix two versions of the input
        (folder / f"{unit.name}.json").unlink(missing_ok=True)  # that of an earlier job would vouch for this part
    sidecar = EmbeddingSidecar(
        unit=unit.name,
        identity=identity,
        num_bytes=(folder / f"{unit.name}.parquet").stat().st_size,
        pieces=[
            Piece(**dict(zip(_COUNTS, row, strict=True)), skipped=dict(sorted(reasons.items())), lost=sorted(paths))
            for row, reasons, paths in zip(counts.tolist(), skipped, lost, strict=True)
        ],
    )
    write_text(folder / f"{unit.name}.json", sidecar.model_dump_json(indent=1) + "\n")  # last: marks the part as whole
    return sidecar


def finished(unit: str, identity: str, folder: Path) -> EmbeddingSidecar | None:
    """Sidecar of a unit that needs no more work, or None."""
    try:
        sidecar = EmbeddingSidecar.model_validate_json((folder / f"{unit}.json").read_bytes())
    except (FileNotFoundError, ValidationError):  # not done yet, or by another version
        return None
    path = folder / f"{unit}.parquet"
    whole = path.is_file() and path.stat().st_size == sidecar.num_bytes
    return sidecar if whole and sidecar.identity == identity else None


def embed_distinct(
    encoder: SentenceEncoder, texts: list[str], shape: Shape
) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.int64]]:
    """Rows `(len(texts), dimensions)` as written, which are finite, and tokens; equal texts are embedded once."""
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(text, len(numbers)) for text in texts]
    embeddings, tokens = encode_counted(encoder, list(numbers))
    rounded = shaped(embeddings, shape)
    # a finite number may be too large for float16
    checked = rounded if shape.dtype == "float16" else embeddings[:, : shape.dimensions]
    finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(checked), axis=1)
    return rounded[places], finite[places], tokens[places]


def shaped(embeddings: NDArray[np.float32], shape: Shape) -> NDArray[Any]:
    """Truncate, then normalise, then round."""
    kept = embeddings[:, : shape.dimensions]
    if shape.normalise:
        kept = unit_rows(kept)
    with np.errstate(over="ignore", invalid="ignore"):  # too large for float16, or NaN: the caller checks
        if shape.dtype == "int8":
            kept = np.rint(kept * (127 / np.maximum(np.abs(kept).max(axis=1, keepdims=True, initial=0), 1e-30)))
        return np.ascontiguousarray(kept, dtype=shape.dtype)


Keyed = tuple[Record, str | None]  # A record with its id; a failure if either cannot be read


def keyed(unit: Unit, records: Iterator[Record], config: EmbedConfig) -> Iterator[Keyed]:
    """Pair each record of a unit with its id, read in a second pass over the same unit."""
    if config.id_field is None:
        yield from ((record, None) for record in records)
        return
    for record, key in itertools.zip_longest(records, UnitReader(unit, corpus_of(config, config.id_field))):
        if record is None or key is None or (record.source, record.offset) != (key.source, key.offset):
            place = record or key
            raise UsageError(f"{path_of(unit, place.source)} at {place.offset}: cannot pair texts with ids")
        if isinstance(record, ReadFailure) or isinstance(key, Document):
            yield record, key.text if isinstance(key, Document) else None
        else:
            message = re.sub("^(the|no) text ", r"\1 id ", key.message) + _ID_HINT
            yield key.model_copy(update={"reason": key.reason.replace(NO_TEXT, "no_id"), "message": message}), None


def _windows(records: Iterator[Keyed]) -> Iterator[list[Keyed]]:
    """Yield a bounded number of records and characters, to be sorted by length and embedded together."""
    window, num_characters = list[Keyed](), 0
    for record, key in records:
        window.append((record, key))
        num_characters += len(record.text) if isinstance(record, Document) else 0
        if len(window) == _WINDOW_TEXTS or num_characters >= _WINDOW_CHARACTERS:
            yield window
            window, num_characters = [], 0
    if window:
        yield window
