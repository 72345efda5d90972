"""Made-up documents in the shards' schema: equal for equal seeds, on any machine."""

import hashlib

import numpy as np
import pyarrow as pa

from common import seeding
from pipeline.readers.corpus import ID_BYTES
from pipeline.shards.schema import shard_schema
from pipeline.shards.windows import Geometry, window_starts
from trainer.objectives.span_settings import SpanConfig

_FIRST_ORDINARY = 4  # lower ids are RoBERTa's special tokens


def documents(first: int, count: int, spans: SpanConfig, vocab_size: int, seed: int) -> pa.Table:
    """Documents [first, first + count) of an endless corpus.

    A document has between one and two times the tokens that its anchors need (2048 and more with the paper's spans).
    Its tokens are drawn uniformly from the vocabulary without special ids.
    """
    schema = shard_schema(vocab_size, Geometry(num_anchors=spans.num_anchors, max_tokens=spans.max_tokens), "made up")
    numbers = np.arange(first, first + count, dtype=np.uint64)
    least = spans.min_document_tokens
    lengths = least + (_uniform(seed, "benchmark lengths", numbers) * least).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ordinary = vocab_size - 1 - _FIRST_ORDINARY
    tokens = np.empty(int(offsets[-1]), schema.field("tokens").type.value_type.to_pandas_dtype())
    for number, start, end in zip(numbers.tolist(), offsets.tolist(), offsets[1:].tolist(), strict=False):
        key = np.array([number], np.uint64)
        drawn = seeding.words(seed, "benchmark tokens", key, np.zeros_like(key), end - start)[0]
        tokens[start:end] = _FIRST_ORDINARY + (seeding.unit(drawn) * ordinary).astype(np.int64)
    windows = [window_starts(length, spans.max_tokens) for length in lengths.tolist()]
    window_offsets = np.cumsum([0, *map(len, windows)]).astype(np.int32)
    ids = b"".join(hashlib.blake2b(f"{seed} {n}".encode(), digest_size=ID_BYTES).digest() for n in numbers.tolist())
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(ID_BYTES), count, [None, pa.py_buffer(ids)]),
        pa.ListArray.from_arrays(offsets, tokens),
        pa.ListArray.from_arrays(window_offsets, np.concatenate([np.empty(0, np.int32), *windows])),
        pa.array(lengths),
        pa.array(["made up"] * count),
        pa.array(numbers.astype(np.int64)),
    ]
    return pa.table([column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema=schema)


def _uniform(seed: int, purpose: str, numbers: seeding.U64) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Draw a number in [0, 1) for each document."""
    return seeding.unit(seeding.blocks(seed, purpose, numbers, np.zeros_like(numbers), np.zeros_like(numbers))[:, 0])
