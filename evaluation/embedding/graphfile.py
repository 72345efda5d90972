"""Graph files of usearch, read and checked with NumPy before usearch maps them.

usearch trusts a file: a neighbour beyond the last vector makes it read outside its memory. So every number that usearch
follows is compared here with its valid range. After that, no byte of the file can lead outside the file.

The layout, little-endian, for n vectors of d numbers: n and 4d as 32-bit numbers; the vectors; a head of 64 bytes; n,
the two connectivities, the highest level and the first node as 64-bit numbers; n levels of 16 bits; n nodes. A node is
its key (64 bits), its level l (16 bits) and l + 1 lists of neighbours: their number (32 bits), then slots for them.
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.embedding.config import EmbedError

CONNECTIVITY = 32
_BASE_CONNECTIVITY = 2 * CONNECTIVITY
_SIZES, _HEAD, _START = struct.Struct("<II"), struct.Struct("<7sH4x4sQQQB22s"), struct.Struct("<5Q")
_KINDS = b"i\x0b\x0e\x0f"
"""Inner product, float32, keys of 64 bits, slots of 32 bits."""
_KEY_BYTES, _LEVEL_BYTES, _PLACE_BYTES = 8, 2, 4
_LIST_BYTES = _PLACE_BYTES * (1 + CONNECTIVITY)
_BASE_BYTES = _PLACE_BYTES * (1 + _BASE_CONNECTIVITY)
_NODE_BYTES = _KEY_BYTES + _LEVEL_BYTES + _BASE_BYTES  # without higher levels
_CHUNK_NODES = 8192

Bytes = NDArray[np.uint8]


def graph_vectors(path: Path, size: int) -> NDArray[np.float32]:
    """Map the vectors `(rows, size)` of a graph, after checking every link in the graph.

    Raises:
        EmbedError: the file is cut off, altered, or not a graph that `write_graphs` writes.
    """
    wrong = EmbedError(f"{path} is cut off, altered, or not a graph of `declutr index`; build the index again")
    try:
        raw: Bytes = np.memmap(path, np.uint8, "r")
        rows, row_bytes = _SIZES.unpack(raw[: _SIZES.size].tobytes())
        end = _SIZES.size + rows * row_bytes
        magic, major, kinds, present, deleted, numbers, multi, rest = _HEAD.unpack(
            raw[end : end + _HEAD.size].tobytes()
        )
        start = _START.unpack(raw[end + _HEAD.size :][: _START.size].tobytes())
    except (ValueError, struct.error) as error:  # an empty file, or a short one
        raise wrong from error
    if (magic, major, kinds, row_bytes, numbers) != (b"usearch", 2, _KINDS, 4 * size, size):
        raise wrong
    if (present, deleted, multi, rest) != (rows, 0, 0, bytes(22)) or not rows:
        raise wrong
    first = end + _HEAD.size + _START.size
    if start[:3] != (rows, CONNECTIVITY, _BASE_CONNECTIVITY) or len(raw) < first + (_LEVEL_BYTES + _NODE_BYTES) * rows:
        raise wrong
    levels = raw[first : first + _LEVEL_BYTES * rows].view("<i2").astype(np.int64)
    if levels.min() < 0 or start[3] != levels.max() or start[4] >= rows or levels[start[4]] != start[3]:
        raise wrong
    offsets = first + _LEVEL_BYTES * rows + np.cumsum(np.concatenate([[0], _NODE_BYTES + _LIST_BYTES * levels]))
    if offsets[-1] != len(raw) or not _lead_inside(raw, offsets[:-1], levels):
        raise wrong
    vectors = raw[_SIZES.size : end].view("<f4").reshape(rows, size)
    if not all(np.isfinite(vectors[begin : begin + _CHUNK_NODES]).all() for begin in range(0, rows, _CHUNK_NODES)):
        raise wrong
    return vectors


def _lead_inside(raw: Bytes, offsets: NDArray[np.int64], levels: NDArray[np.int64]) -> bool:
    """Check that each node has its number as key, its level, and neighbours that reach the level of the list."""
    for begin in range(0, len(offsets), _CHUNK_NODES):
        at = offsets[begin : begin + _CHUNK_NODES]
        keys = _at(raw, at, _KEY_BYTES).view("<u8")[:, 0]
        own = _at(raw, at + _KEY_BYTES, _LEVEL_BYTES).view("<i2")[:, 0]
        if not (keys == np.arange(begin, begin + len(at))).all() or not (own == levels[begin : begin + len(at)]).all():
            return False
        if not _are_nodes(_at(raw, at + _KEY_BYTES + _LEVEL_BYTES, _BASE_BYTES), levels, 0):
            return False
        for level in range(1, int(own.max()) + 1):
            lists = at[own >= level] + _NODE_BYTES + (level - 1) * _LIST_BYTES
            if not _are_nodes(_at(raw, lists, _LIST_BYTES), levels, level):
                return False
    return True


def _at(raw: Bytes, offsets: NDArray[np.int64], num_bytes: int) -> Bytes:
    """Bytes at each offset, `(len(offsets), num_bytes)`."""
    return np.lib.stride_tricks.sliding_window_view(raw, num_bytes)[offsets]


def _are_nodes(lists: Bytes, levels: NDArray[np.int64], level: int) -> bool:
    """Check that lists `(n, bytes)` fit their slots and name only nodes that reach that level."""
    values = lists.view("<u4")
    counts, places = values[:, :1], values[:, 1:]
    if (counts > places.shape[1]).any():
        return False
    named = places[np.arange(places.shape[1]) < counts]
    return bool((named < len(levels)).all() and (levels[named] >= level).all())
