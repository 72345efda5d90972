"""Checks of a shard, which may come from others: offsets, as Arrow reads wherever they point, windows, texts, ids."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.shards.content import (
    LABELS,
    NO_LABEL,
    TRIPLE_LABELS,
    AudioContent,
    ContentKind,
    ImagesContent,
    TextKind,
)
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.shards.media import media_problem
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.pipeline.shards.writer import media_schema, shard_schema

_TOKEN_TYPES = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))


def schema_problem(schema: pa.Schema, kind: ContentKind = "documents") -> str | None:
    """A problem of the columns; None if they are those of a shard with this kind of rows."""
    # Only names and types are compared, so any geometry will do.
    expected = media_schema(kind) if kind == "images" or kind == "audio" else shard_schema(1, Geometry(), "", kind=kind)
    if sorted(schema.names) != sorted(expected.names):
        return f"its columns are {', '.join(schema.names)}, not {', '.join(expected.names)}"
    for field in expected:
        types = _TOKEN_TYPES if field.name == "tokens" else (field.type,)
        if (column_type := schema.field(field.name).type) not in types:
            return f"its column {field.name} holds {column_type}, not {' or '.join(map(str, types))}"
    return None


def memory_problem(batch: pa.RecordBatch) -> str | None:
    """The reason why reading rows of a record batch could leave its memory; None if it cannot."""
    try:
        batch.validate(full=True)  # Arrow itself does not check offsets when it reads
    except pa.ArrowException as error:
        return " ".join(str(error).split())
    columns = {name: batch.column(name) for name in batch.schema.names}
    empty = [  # the bytes of a null can be anything
        name
        for name, column in columns.items()
        if column.null_count or (pa.types.is_list(column.type) and column.values.null_count)
    ]
    return f"its column {', '.join(empty)} holds nulls" if empty else None


def content_problem(
    batch: pa.RecordBatch,  # rows of a shard without a `memory_problem`
    geometry: Geometry,  # geometry of the manifest
    short_documents: ShortDocuments,  # setting of the manifest
    vocab_size: int,  # vocabulary size of the manifest's tokenizer; all ids are below it
    kind: TextKind = "documents",  # kind of rows in the manifest
) -> tuple[int, str] | None:
    """The first row with contradictory numbers, and its problem; None if all rows agree."""
    if not len(batch):
        return None
    tokens, lengths = _lists(batch, "tokens")
    num_tokens = batch.column("num_tokens").to_numpy()
    if row := _first(num_tokens != lengths):  # lengths first: all other checks use them
        return row[0], f"num_tokens = {num_tokens[row[0]]}, but it has {lengths[row[0]]} tokens"
    if kind == "documents":
        problem = _windows_problem(batch, geometry, short_documents, num_tokens)
    else:
        problem = _texts_problem(batch, kind, num_tokens)
    if problem:
        return problem
    if row := _first(tokens >= vocab_size):
        at = int(np.searchsorted(np.cumsum(lengths), row[0], side="right"))  # "right", as a row ends before its sum
        return at, f"token id {tokens[row[0]]} is beyond the vocabulary of {vocab_size} tokens"
    return None


def _windows_problem(
    batch: pa.RecordBatch, geometry: Geometry, short_documents: ShortDocuments, num_tokens: NDArray[np.int64]
) -> tuple[int, str] | None:
    """The first document whose windows are not those of its length."""
    windows, counts = _lists(batch, "windows")
    longest = np.full(len(num_tokens), geometry.max_tokens)
    if short_documents == "shrink_spans":
        # At least 1, or the division below would be by zero.
        longest = np.maximum(1, np.minimum(longest, num_tokens // (2 * geometry.num_anchors)))
    if row := _first(counts != num_tokens // longest):
        at = row[0]
        return (
            at,
            f"{counts[at]} windows, but its {num_tokens[at]} tokens have {num_tokens[at] // longest[at]} "
            f"of {longest[at]}",
        )
    starts = _ordinals(counts) * np.repeat(longest, counts)
    if row := _first(windows != starts):
        at = int(np.searchsorted(np.cumsum(counts), row[0], side="right"))  # "right", as a row ends before its sum
        return at, f"a window starts at {windows[row[0]]}, not at {starts[row[0]]}"
    return None


def _texts_problem(batch: pa.RecordBatch, kind: TextKind, num_tokens: NDArray[np.int64]) -> tuple[int, str] | None:
    """The first row whose texts or labels are not those of this kind."""
    (starts, counts), (labels, labelled) = _lists(batch, "starts"), _lists(batch, "labels")
    if row := _first(counts != labelled):
        return row[0], f"{counts[row[0]]} starts of texts, but {labelled[row[0]]} labels"
    wrong = {"sentences": counts != 1, "pairs": counts < 2, "triples": counts != len(TRIPLE_LABELS)}[kind]
    if row := _first(wrong):
        return row[0], f"{counts[row[0]]} texts, which a row of {kind} never has"
    places, owners = _ordinals(counts), np.repeat(np.arange(len(counts)), counts)
    first = places == 0
    before = np.where(first, -1, np.roll(starts, 1))  # a row's first text has the start of another row before it
    if row := _first((first & (starts != 0)) | (starts <= before) | (starts >= num_tokens[owners])):
        at, place = int(owners[row[0]]), int(places[row[0]])
        after = f", the text before it at {before[row[0]]}" if place else ""
        return at, f"text {place} starts at {starts[row[0]]}{after}; the row has {num_tokens[at]} tokens"
    expected = np.array(TRIPLE_LABELS)[places] if kind == "triples" else np.where(first, NO_LABEL, labels)
    if row := _first((labels != expected) | (~first & ((labels < 0) | (labels >= len(LABELS))))):
        return int(owners[row[0]]), f"text {places[row[0]]} has the label {labels[row[0]]}"
    return None


def _first(wrong: NDArray[np.bool_]) -> tuple[int] | None:
    """Index of the first True value, or None."""
    return (int(wrong.argmax()),) if wrong.any() else None  # a tuple, because row 0 alone is false


def _lists(batch: pa.RecordBatch, name: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values of a list column, and the length of each list."""
    lists = batch.column(name)
    # `values` would ignore a slice.
    return lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy().astype(np.int64))


def _ordinals(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0..count-1 for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def rows_problem(rows: pa.RecordBatch, manifest: Manifest) -> tuple[int, str] | None:
    """Like `content_problem`, with the kind of rows, the geometry and the vocabulary of a manifest."""
    content = manifest.content
    if isinstance(content, ImagesContent | AudioContent):
        return media_problem(rows, content.kind, getattr(content, "num_mel_bins", 0))
    vocab_size = manifest.text_tokenizer.vocab_size
    return content_problem(rows, manifest.geometry, manifest.short_documents, vocab_size, content.kind)
