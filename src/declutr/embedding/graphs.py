"""Nearest neighbours by graphs (HNSW: Malkov and Yashunin, 2016) of a fixed number of rows, and checks of their files.

usearch can also add to one graph with several threads. Such a graph differs every time, and among many nearly equal
vectors some cannot be found, not even by themselves (docs/evidence/log.md). So each thread builds separate graphs; the
split of rows into graphs does not depend on the number of threads.

usearch trusts a file: a neighbour beyond the last vector makes it read outside its memory. So every number that usearch
follows is compared here with its valid range. After that, no byte of the file can lead outside the file.

The layout, little-endian, for n vectors of d numbers of b bytes: n and bd as 32-bit numbers; the vectors; a head of 64
bytes; n, the two connectivities, the highest level and the first node as 64-bit numbers; n levels of 16 bits; n nodes.
A node is its key (64 bits), its level l (16 bits) and l + 1 lists of neighbours: their number (32 bits), then slots.
"""

import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from declutr.embedding.config import EmbedError, Shape, VectorType
from declutr.embedding.units import shaped
from declutr.encoders.protocol import unit_rows

CONNECTIVITY = 32
_BASE_CONNECTIVITY = 2 * CONNECTIVITY
_SIZES, _HEAD, _START = struct.Struct("<II"), struct.Struct("<7sH4x4sQQQB22s"), struct.Struct("<5Q")
_KINDS: dict[VectorType, bytes] = {"float32": b"i\x0b\x0e\x0f", "int8": b"c\x17\x0e\x0f"}
"""Inner product or cosine, type of the numbers, keys of 64 bits, slots of 32 bits."""
_KEY_BYTES, _LEVEL_BYTES, _PLACE_BYTES = 8, 2, 4
_LIST_BYTES = _PLACE_BYTES * (1 + CONNECTIVITY)
_BASE_BYTES = _PLACE_BYTES * (1 + _BASE_CONNECTIVITY)
_NODE_BYTES = _KEY_BYTES + _LEVEL_BYTES + _BASE_BYTES  # without higher levels
_CHUNK_NODES = 8192

Bytes = NDArray[np.uint8]


def graph_vectors(path: Path, size: int, dtype: VectorType) -> NDArray[Any]:
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
    if (magic, major, kinds, row_bytes, numbers) != (
        b"usearch",
        2,
        _KINDS[dtype],
        np.dtype(dtype).itemsize * size,
        size,
    ):
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
    vectors = raw[_SIZES.size : end].view(np.dtype(dtype).newbyteorder("<")).reshape(rows, size)
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


_PART_ROWS = 100_000
_TOLD_ROWS = 1000
_EXPANSION = 256
_RESCORED = 4
"""Texts that int8 graphs give for each text wanted, of which cosines with the query in float32 choose."""
_MOST_THREADS = 8  # each holds a part twice: as vectors, and inside its graph


def write_graphs(
    folder: Path,
    size: int,
    chunks: Iterable[NDArray[Any]],
    told: Callable[[int], object],
    part_rows: int = _PART_ROWS,
    threads: int | None = None,
) -> None:
    """Write `graph-00000.usearch` and so on, each of `part_rows` rows, from `(rows, size)` vectors.

    Vectors are float32 of length 1, or int8 of any length.

    `told` is called from any thread with the number of newly added rows. As many graphs as threads are built at once;
    None: one per core, up to eight.
    """
    threads = threads or min(os.cpu_count() or 1, _MOST_THREADS)
    stopped = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[None]] = deque()
        try:
            for number, vectors in enumerate(_parts(chunks, part_rows)):
                if len(pending) == threads:
                    pending.popleft().result()
                path = folder / f"graph-{number:05d}.usearch"
                pending.append(pool.submit(_write, path, size, vectors, told, stopped))
            for future in pending:
                future.result()
        finally:
            stopped.set()  # after an error or Ctrl-C, threads stop at their current rows


def _parts(chunks: Iterable[NDArray[Any]], part_rows: int) -> Iterator[NDArray[Any]]:
    held: list[NDArray[Any]] = []
    room = part_rows
    for chunk in chunks:
        rest = chunk
        while len(rest):
            taken, rest = rest[:room], rest[room:]
            held.append(taken)
            room -= len(taken)
            if room == 0:
                yield np.concatenate(held)
                held, room = [], part_rows
    if held:
        yield np.concatenate(held)


def _write(
    path: Path, size: int, vectors: NDArray[Any], told: Callable[[int], object], stopped: threading.Event
) -> None:
    graph = _empty(size, "int8" if vectors.dtype == np.int8 else "float32")
    for start in range(0, len(vectors), _TOLD_ROWS):
        if stopped.is_set():
            return
        some = vectors[start : start + _TOLD_ROWS]
        graph.add(np.arange(start, start + len(some), dtype=np.uint64), some, threads=1)
        told(len(some))
    try:
        graph.save(str(path))
    except RuntimeError as error:
        raise OSError(f"{path} cannot be written ({error})") from error


def _empty(size: int, dtype: VectorType) -> Index:
    return Index(
        ndim=size,
        metric="ip" if dtype == "float32" else "cos",
        dtype="f32" if dtype == "float32" else "i8",
        connectivity=CONNECTIVITY,
        expansion_add=_EXPANSION,
        expansion_search=_EXPANSION,
    )


class Graphs:
    """Graphs of a folder, in writing order; mapped instead of read, because they may be larger than the memory.

    Raises:
        EmbedError: a file is cut off or altered, or they do not belong together.
    """

    def __init__(self, paths: Sequence[Path], size: int, dtype: VectorType = "float32") -> None:
        self._size, self._is_int8 = size, dtype == "int8"
        self._vectors = [graph_vectors(path, size, dtype) for path in paths]
        self._graphs = [_empty(size, dtype) for _ in paths]
        for graph, path in zip(self._graphs, paths, strict=True):
            graph.view(str(path))
        self._part_rows = len(self._graphs[0]) if self._graphs else 1
        rows = [len(graph) for graph in self._graphs]
        if any(number != self._part_rows for number in rows[:-1]) or max(rows, default=0) > self._part_rows:
            raise EmbedError("the graphs of the index have different sizes; build the index again")

    def __len__(self) -> int:
        return sum(map(len, self._graphs))

    def nearest(self, queries: NDArray[np.float32], top: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and cosines, each `(queries, top)`, nearest first.

        `queries` is `(queries, size)`, of length 1; `top` is at most the number of rows.
        """
        rows, scores = [], []
        asked = shaped(queries, Shape(dtype="int8")) if self._is_int8 else queries
        wanted = _RESCORED * top if self._is_int8 else top
        for number, graph in enumerate(self._graphs):
            found = graph.search(asked, min(wanted, len(graph)))
            keys = np.asarray(found.keys).reshape(len(queries), -1).astype(np.int64)
            rows.append(keys + number * self._part_rows)
            scores.append(1 - np.asarray(found.distances, np.float32).reshape(len(queries), -1))
        every_row, every_score = np.concatenate(rows, axis=1), np.concatenate(scores, axis=1)
        if self._is_int8:  # the graphs compared rounded queries
            pairs = zip(queries, every_row.tolist(), strict=True)
            every_score = np.stack([self.vectors(mine) @ query for query, mine in pairs])
        best = np.argsort(-every_score, axis=1, kind="stable")[:, :top]
        return np.take_along_axis(every_row, best, axis=1), np.take_along_axis(every_score, best, axis=1)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        places = [divmod(row, self._part_rows) for row in rows]
        found = [self._vectors[part][row] for part, row in places]
        stacked = np.stack(found) if found else np.empty((0, self._size), np.float32)
        return unit_rows(stacked.astype(np.float32)) if self._is_int8 else stacked
