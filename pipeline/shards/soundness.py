"""Checks of a shard's documents: offsets inside the data, windows inside the document, ids inside the vocabulary.

A shard may come from someone else, and Arrow reads wherever a file's offsets point.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.shards.windows import Geometry, ShortDocuments

_TYPES = {
    "id": (pa.binary(16),),
    "tokens": (pa.list_(pa.uint16()), pa.list_(pa.uint32())),
    "windows": (pa.list_(pa.int32()),),
    "num_tokens": (pa.int64(),),
    "source": (pa.string(),),
    "offset": (pa.int64(),),
}


def schema_problem(schema: pa.Schema) -> str | None:
    """A problem of the columns; None if they are those of a shard."""
    if sorted(schema.names) != sorted(_TYPES):
        return f"its columns are {', '.join(schema.names)}, not {', '.join(_TYPES)}"
    for name, types in _TYPES.items():
        if (found := schema.field(name).type) not in types:
            return f"its column {name} holds {found}, not {' or '.join(map(str, types))}"
    return None


def memory_problem(batch: pa.RecordBatch) -> str | None:
    """The reason why reading rows of a record batch could leave its memory; None if it cannot."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        return " ".join(str(error).split())
    empty = [name for name in batch.schema.names if _nulls(batch.column(name))]
    return f"its column {', '.join(empty)} holds nulls" if empty else None


def _nulls(column: pa.Array) -> int:
    inner = column.values.null_count if pa.types.is_list(column.type) else 0
    return int(column.null_count + inner)


def content_problem(
    batch: pa.RecordBatch, geometry: Geometry, short_documents: ShortDocuments, vocab_size: int
) -> tuple[int, str] | None:
    """The first row with contradictory numbers, and its problem; None if all rows agree.

    Args:
        batch: rows of a shard without a `memory_problem`.
        geometry: geometry of the manifest.
        short_documents: setting of the manifest.
        vocab_size: vocabulary size of the manifest's tokenizer; all ids are below it.
    """
    if not len(batch):
        return None
    (tokens, lengths), (windows, counts) = _lists(batch, "tokens"), _lists(batch, "windows")
    said = batch.column("num_tokens").to_numpy()
    if row := _first(said != lengths):
        return row[0], f"num_tokens = {said[row[0]]}, but it has {lengths[row[0]]} tokens"
    longest = np.full(len(said), geometry.max_tokens)
    if short_documents == "shrink_spans":
        longest = np.maximum(1, np.minimum(longest, said // (2 * geometry.num_anchors)))
    if row := _first(counts != said // longest):
        at = row[0]
        return at, f"{counts[at]} windows, but its {said[at]} tokens have {said[at] // longest[at]} of {longest[at]}"
    starts = _ordinals(counts) * np.repeat(longest, counts)
    if row := _first(windows != starts):
        at = int(np.searchsorted(np.cumsum(counts), row[0], side="right"))
        return at, f"a window starts at {windows[row[0]]}, not at {starts[row[0]]}"
    if row := _first(tokens >= vocab_size):
        at = int(np.searchsorted(np.cumsum(lengths), row[0], side="right"))
        return at, f"token id {tokens[row[0]]} is beyond the vocabulary of {vocab_size} tokens"
    return None


def _first(wrong: NDArray[np.bool_]) -> tuple[int] | None:
    """Index of the first True value, or None."""
    return (int(wrong.argmax()),) if wrong.any() else None


def _lists(batch: pa.RecordBatch, name: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values of a list column, and the length of each list."""
    lists = batch.column(name)
    return lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy().astype(np.int64))


def _ordinals(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0..count-1 for each count, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
