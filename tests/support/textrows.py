"""Rows of sentences, pairs and triples, as the shards hold them."""

import numpy as np
import pyarrow as pa
from tiny import VOCAB_SIZE


def text_rows(rows: list[list[tuple[int, int]]], seed: int = 0) -> pa.Table:
    """Rows of random texts; each text is given by its number of tokens and its label."""
    columns = {"id": [], "tokens": [], "starts": [], "labels": [], "num_tokens": []}
    for number, texts in enumerate(rows):
        rng = np.random.default_rng([seed, number])
        sizes = [size for size, _ in texts]
        columns["id"].append(rng.bytes(16))
        columns["tokens"].append(rng.integers(4, VOCAB_SIZE - 1, sum(sizes)))
        columns["starts"].append(np.cumsum([0, *sizes[:-1]]))
        columns["labels"].append([label for _, label in texts])
        columns["num_tokens"].append(sum(sizes))
    types = {
        "id": pa.binary(16),
        "tokens": pa.list_(pa.uint16()),
        "starts": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int8()),
        "num_tokens": pa.int64(),
    }
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})


def sentences(lengths: list[int], seed: int = 0) -> pa.Table:
    """Rows of one sentence each."""
    return text_rows([[(length, -1)] for length in lengths], seed)
