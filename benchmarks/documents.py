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
    zeros = np.zeros_like(numbers)
    shares = seeding.unit(seeding.blocks(seed, "benchmark lengths", numbers, zeros, zeros)[:, 0])
    lengths = least + (shares * least).astype(np.int64)
    ordinary = vocab_size - 1 - _FIRST_ORDINARY
    stored = schema.field("tokens").type.value_type.to_pandas_dtype()
    tokens = []
    for key, length in zip(np.split(numbers, count), lengths.tolist(), strict=True):
        drawn = seeding.words(seed, "benchmark tokens", key, np.zeros_like(key), length)[0]
        tokens.append((_FIRST_ORDINARY + (seeding.unit(drawn) * ordinary).astype(np.int64)).astype(stored))
    columns = [
        [hashlib.blake2b(f"{seed} {number}".encode(), digest_size=ID_BYTES).digest() for number in numbers.tolist()],
        tokens,
        [window_starts(length, spans.max_tokens) for length in lengths.tolist()],
        lengths,
        ["made up"] * count,
        numbers.astype(np.int64),
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
