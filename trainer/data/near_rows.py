"""Rows of a batch that nearly repeat another one, found by sketches of their tokens. NumPy alone.

A sketch is the eight smallest hashes of a row's shingles of three tokens. Of the eight smallest hashes of two sketches
together, about the share J is in both, if J is the Jaccard similarity of the shingles.
"""

import numpy as np
import pyarrow as pa

from declutr.pipeline.shards.shards import ragged

_SHINGLE, _SKETCH = 3, 8
_SIMILAR = 0.6  # as duplicates.near.similarity, which is the remedy of the alarm
_MOST_TOKENS = 512
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def near_rows(rows: pa.Table) -> int:
    """Number of rows of texts that nearly repeat an earlier one; 0 for images and sounds."""
    if "tokens" not in rows.column_names:
        return 0
    tokens, offsets = ragged(rows.column("tokens"))
    sketches, rows_with, found = list[set[int]](), dict[int, list[int]](), 0
    for row, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        sketch = _sketch(tokens[start : min(end, start + _MOST_TOKENS)])
        candidates = {other for value in sketch for other in rows_with.get(value, ())}
        found += any(_similarity(sketch, sketches[other]) >= _SIMILAR for other in candidates)
        sketches.append(sketch)
        for value in sketch:
            rows_with.setdefault(value, []).append(row)
    return found


def _similarity(one: set[int], other: set[int]) -> float:
    """Estimate of the Jaccard similarity of two rows from their sketches."""
    smallest, both = sorted(one | other)[:_SKETCH], one & other
    return sum(value in both for value in smallest) / len(smallest)


def _sketch(tokens: np.ndarray) -> set[int]:
    """The smallest hashes of the shingles of some tokens, fewer of a short text."""
    if not len(tokens):
        return set()
    width = min(_SHINGLE, len(tokens))
    values = np.zeros(len(tokens) - width + 1, np.uint64)
    for place in range(width):
        values = (values + tokens[place : place + len(values)].astype(np.uint64) + np.uint64(1)) * _FACTOR
    values = np.unique((values ^ (values >> np.uint64(31))) * _MIX)
    return set(values[:_SKETCH].tolist())
