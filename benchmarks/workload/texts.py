"""Made-up documents, sentences and pairs in the shards' schema: equal for equal seeds, on any machine."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa

from declutr.common import seeding
from declutr.pipeline.readers.corpus import ID_BYTES
from declutr.pipeline.shards.content import LABELS, NO_LABEL
from declutr.pipeline.shards.schema import shard_schema
from declutr.pipeline.shards.windows import Geometry, window_starts
from declutr.trainer.objectives.span_config import SpanConfig

# Lengths without specials, in tokens of bert-base-uncased, at 0%, 5%, ..., 100% of 4,000 texts each: sentences of the
# English Wikipedia, and premises and hypotheses of SNLI's development set with the counterfactually augmented NLI data.
_SENTENCE = (5, 9, 11, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 33, 51)
_PREMISE = (2, 7, 8, 9, 10, 11, 11, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20, 22, 24, 28, 64)
_HYPOTHESIS = (2, 4, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9, 10, 11, 12, 13, 15, 37)
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


def text_rows(first: int, count: int, pairs: bool, vocab_size: int, seed: int) -> pa.Table:
    """Rows [first, first + count) of an endless corpus.

    A row is a sentence or, with `pairs`, a premise with a hypothesis of each label. Lengths are drawn from those of
    real texts, tokens uniformly from the vocabulary without special ids.
    """
    numbers = np.arange(first, first + count, dtype=np.uint64)
    lengths = [_PREMISE, *[_HYPOTHESIS] * len(LABELS)] if pairs else [_SENTENCE]
    labels = [NO_LABEL, *range(len(LABELS))] if pairs else [NO_LABEL]
    zeros = np.zeros_like(numbers)
    shares = seeding.unit(seeding.blocks(seed, "benchmark texts", numbers, zeros, zeros))
    points = [np.linspace(0, 1, len(known)) for known in lengths]
    sizes = np.stack(
        [np.interp(shares[:, place], points[place], known) for place, known in enumerate(lengths)], axis=1
    ).astype(np.int64)
    columns: dict[str, list[Any]] = {name: [] for name in ("id", "tokens", "starts", "labels", "num_tokens")}
    for key, of_row in zip(np.split(numbers, count), sizes, strict=True):
        total = int(of_row.sum())
        drawn = seeding.words(seed, "benchmark tokens", key, np.zeros_like(key), total)[0]
        name = f"{seed} {int(key[0])}".encode()
        columns["id"].append(hashlib.blake2b(name, digest_size=ID_BYTES).digest())
        columns["tokens"].append(
            (_FIRST_ORDINARY + seeding.unit(drawn) * (vocab_size - 1 - _FIRST_ORDINARY)).astype(np.int64)
        )
        columns["starts"].append(np.cumsum(of_row) - of_row)
        columns["labels"].append(labels)
        columns["num_tokens"].append(total)
    types = {
        "id": pa.binary(ID_BYTES),
        "tokens": pa.list_(pa.uint16() if vocab_size <= 2**16 else pa.uint32()),
        "starts": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int8()),
        "num_tokens": pa.int64(),
    }
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
