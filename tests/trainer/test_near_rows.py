"""Rows of a batch that nearly repeat another one, against their Jaccard similarity."""

import time

import numpy as np
import pyarrow as pa
import pytest
from tiny import documents

from declutr.trainer.data.near_rows import near_rows


def test_near_rows_counts_rows_that_repeat_another():
    table = documents([200, 300, 12, 5, 2], 10)
    assert near_rows(table) == 0
    twice = pa.concat_tables([table, table.slice(1, 3)]).combine_chunks()
    assert near_rows(twice) == 3
    tokens = table["tokens"].to_pylist()
    tokens[1] = [*tokens[0][:150], *tokens[1][:10]]
    near = table.set_column(table.column_names.index("tokens"), "tokens", pa.array(tokens, pa.list_(pa.uint16())))
    assert near_rows(near) == 1
    assert near_rows(table.drop_columns(["tokens"])) == 0
    started = time.process_time()
    assert near_rows(documents([500] * 256, 100)) == 0
    assert time.process_time() - started < 5


def texts_of(tokens):
    return pa.table({"tokens": pa.array([row.tolist() for row in tokens], pa.list_(pa.uint16()))}).combine_chunks()


def overlapping(similarity, seed, length=402):
    """Two texts whose shingles have about this Jaccard similarity."""
    first, second = np.random.default_rng(seed).integers(0, 60_000, (2, length))
    common = round((length - 2) * 2 * similarity / (1 + similarity)) + 2
    return first, np.concatenate([first[:common], second[common:]])


@pytest.mark.parametrize(("similarity", "least", "most"), [(0.43, 0, 60), (0.8, 180, 200), (1.0, 200, 200)])
def test_near_rows_counts_rows_by_their_jaccard_similarity(similarity, least, most):
    """Those that `duplicates.near={}` drops, and few of those that it keeps."""
    pairs = [overlapping(similarity, seed) for seed in range(200)]
    assert least <= sum(near_rows(texts_of(pair)) for pair in pairs) <= most


def test_a_copy_of_a_row_that_shares_its_parts_with_earlier_ones_is_counted():
    for seed in range(40):
        first, second = overlapping(0.35, seed)
        joined = np.concatenate([first[:200], second[-200:]])
        for row in (second, joined):
            before = [first, second[-200:], row]
            assert near_rows(texts_of([*before, row])) == near_rows(texts_of(before)) + 1


def test_near_rows_of_a_boilerplate_batch_takes_little_time():
    rng = np.random.default_rng(0)
    common = rng.integers(0, 60_000, 150)
    started = time.process_time()
    near_rows(texts_of([np.concatenate([common, rng.integers(0, 60_000, 350)]) for _ in range(256)]))
    assert time.process_time() - started < 2
