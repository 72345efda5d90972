"""Nearest neighbours by graphs (HNSW: Malkov and Yashunin, 2016) of a fixed number of rows, each built by one thread.

usearch can also add to one graph with several threads. Such a graph differs every time, and among many nearly equal
vectors some cannot be found, not even by themselves (docs/log.md). So each thread builds separate graphs; the split of
rows into graphs does not depend on the number of threads.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from declutr.evaluation.embedding.config import EmbedError
from declutr.evaluation.embedding.graphfile import CONNECTIVITY, graph_vectors

_PART_ROWS = 100_000
_TOLD_ROWS = 1000
_EXPANSION = 256
_MOST_THREADS = 8  # each holds a part twice: as vectors, and inside its graph


def write_graphs(
    folder: Path,
    size: int,
    chunks: Iterable[NDArray[np.float32]],
    told: Callable[[int], object],
    part_rows: int = _PART_ROWS,
    threads: int | None = None,
) -> None:
    """Write `graph-00000.usearch` and so on, each of `part_rows` rows, from `(rows, size)` vectors of length 1.

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


def _parts(chunks: Iterable[NDArray[np.float32]], part_rows: int) -> Iterator[NDArray[np.float32]]:
    held: list[NDArray[np.float32]] = []
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
    path: Path, size: int, vectors: NDArray[np.float32], told: Callable[[int], object], stopped: threading.Event
) -> None:
    graph = _empty(size)
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


def _empty(size: int) -> Index:
    return Index(
        ndim=size,
        metric="ip",
        dtype="f32",
        connectivity=CONNECTIVITY,
        expansion_add=_EXPANSION,
        expansion_search=_EXPANSION,
    )


class Graphs:
    """Graphs of a folder, in writing order; mapped instead of read, because they may be larger than the memory.

    Raises:
        EmbedError: a file is cut off or altered, or they do not belong together.
    """

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self._size = size
        self._vectors = [graph_vectors(path, size) for path in paths]
        self._graphs = [_empty(size) for _ in paths]
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
        for number, graph in enumerate(self._graphs):
            found = graph.search(queries, min(top, len(graph)))
            keys = np.asarray(found.keys).reshape(len(queries), -1).astype(np.int64)
            rows.append(keys + number * self._part_rows)
            scores.append(1 - np.asarray(found.distances, np.float32).reshape(len(queries), -1))
        every_row, every_score = np.concatenate(rows, axis=1), np.concatenate(scores, axis=1)
        best = np.argsort(-every_score, axis=1, kind="stable")[:, :top]
        return np.take_along_axis(every_row, best, axis=1), np.take_along_axis(every_score, best, axis=1)

    def vectors(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Vectors `(len(rows), size)`, of length 1."""
        places = [divmod(row, self._part_rows) for row in rows]
        found = [self._vectors[part][row] for part, row in places]
        return np.stack(found) if found else np.empty((0, self._size), np.float32)
