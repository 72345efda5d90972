"""Rows of a batch that nearly repeat another one, found by sketches of their tokens. NumPy alone.

A sketch is the eight smallest hashes of a row's shingles of three tokens. Two rows whose shingles have the Jaccard
similarity J share about 8 J of them.
"""

from collections import Counter

import numpy as np
import pyarrow as pa

from declutr.pipeline.shards.shards import ragged

_SHINGLE, _SKETCH, _SHARED = 3, 8, 0.6
_MOST_TOKENS = 512
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def near_rows(rows: pa.Table) -> int:
    """Number of rows of texts that nearly repeat an earlier one; 0 for images and sounds."""
    if "tokens" not in rows.column_names:
        return 0
    tokens, offsets = ragged(rows.column("tokens"))
    owners, found = dict[int, int](), 0
    for row, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        sketch = _sketch(tokens[start : min(end, start + _MOST_TOKENS)])
        shared = Counter(owners[value] for value in sketch if value in owners)
        found += bool(shared) and shared.most_common(1)[0][1] >= _SHARED * len(sketch)
        for value in sketch:
            owners.setdefault(value, row)
    return found


def _sketch(tokens: np.ndarray) -> list[int]:
    """The smallest hashes of the shingles of some tokens, fewer of a short text."""
    if not len(tokens):
        return []
    width = min(_SHINGLE, len(tokens))
    values = np.zeros(len(tokens) - width + 1, np.uint64)
    for place in range(width):
        values = (values + tokens[place : place + len(values)].astype(np.uint64) + np.uint64(1)) * _FACTOR
    values = np.unique((values ^ (values >> np.uint64(31))) * _MIX)
    sketch: list[int] = values[:_SKETCH].tolist()
    return sketch
