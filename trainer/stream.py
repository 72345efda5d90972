"""Shards to this rank's documents, step by step, through Ray Data, in the plan's order.

Each rank runs a Dataset of its own over its slice of the plan: chunk numbers go in, a task maps the shards into memory
and picks the chunk's documents, blocks come out in order. No rank waits for another, any world size reads the same
global batches, and a resume starts at its step without skipping anything.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.data import DataContext

from common.logs import get_logger
from pipeline.shards import ShardSet
from trainer.feed import Feed
from trainer.plan import Plan
from trainer.step import RankBatch

_CHUNK_DOCUMENTS = 1024  # a task of fewer is mostly overhead
_CHUNK_TOKENS = 16 * 1024 * 1024  # but a chunk of long documents must fit the object store with room to spare
_MOST_CHUNKS = 512  # of one Dataset: before its first block comes, Ray Data takes about a millisecond for each
_AHEAD_BATCHES = 4
_PATIENCE_SECONDS = 30

_shards: dict[str, ShardSet] = {}  # opened once a process


@dataclass(frozen=True)
class RankPlan:
    """A rank's slice of the plan, cut into chunks of whole steps.

    Attributes:
        plan: the run's plan.
        folder: the shards.
        start: first position of the global batch that the rank reads.
        end: position after its last.
        first_step: 0-based step the stream begins with.
        last_step: step after the last.
        chunk_steps: steps a chunk covers.
    """

    plan: Plan
    folder: str
    start: int
    end: int
    first_step: int
    last_step: int
    chunk_steps: int

    @property
    def num_chunks(self) -> int:
        """Chunks from the first step to the last."""
        return -(-(self.last_step - self.first_step) // self.chunk_steps)

    def chunk(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and document numbers of a chunk, in order."""
        first = self.first_step + number * self.chunk_steps
        last = min(first + self.chunk_steps, self.last_step)
        return self.plan.documents(first, last, self.start, self.end)


def rank_plan(plan: Plan, shards: ShardSet, rank: int, world_size: int, first_step: int, last_step: int) -> RankPlan:
    """The slice of `rank`, with chunks that are neither too small to be quick nor too large to hold."""
    start, end = plan.slice(rank, world_size)
    mean_tokens = max(1, shards.manifest.totals["num_tokens"] // max(1, shards.manifest.totals["kept"]))
    documents = max(1, min(_CHUNK_DOCUMENTS, _CHUNK_TOKENS // mean_tokens))
    chunk_steps = max(1, documents // max(1, end - start))
    return RankPlan(plan, str(shards.folder), start, end, first_step, last_step, chunk_steps)


def read_chunk(rows: dict[str, np.ndarray], rank_plan: RankPlan, first: int) -> pa.Table:
    """Ray Data task: a chunk's number after `first` in, its documents out, with the epoch in which each is read."""
    if rank_plan.folder not in _shards:
        _shards[rank_plan.folder] = ShardSet(Path(rank_plan.folder), "train", look=False)
    epochs, documents = rank_plan.chunk(first + int(rows["id"][0]))
    table = _shards[rank_plan.folder].take(documents).select(["id", "tokens", "windows", "num_tokens"])
    return table.append_column("epoch", pa.array(epochs))


def documents(rank_plan: RankPlan) -> Iterator[pa.Table]:
    """The rank's documents, one table a step; blocks may be cut anywhere, so they are joined and cut again here."""
    per_step = rank_plan.end - rank_plan.start
    if per_step == 0:  # more ranks than documents: this one only takes part in the sums
        yield from ([_no_documents(rank_plan)] * (rank_plan.last_step - rank_plan.first_step))
        return
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    held: list[pa.Table] = []
    for block in _blocks(rank_plan):
        held.append(block)
        available = sum(len(table) for table in held)
        if available >= per_step:
            joined, at = pa.concat_tables(held), 0
            while available - at >= per_step:
                yield joined.slice(at, per_step)
                at += per_step
            held = [joined.slice(at)] if available > at else []


def _blocks(rank_plan: RankPlan) -> Iterator[pa.Table]:
    """The blocks of all chunks in order, from one Dataset after the other."""
    for first in range(0, rank_plan.num_chunks, _MOST_CHUNKS):
        number = min(_MOST_CHUNKS, rank_plan.num_chunks - first)
        dataset = ray.data.range(number, override_num_blocks=number).map_batches(
            read_chunk, fn_kwargs={"rank_plan": rank_plan, "first": first}, batch_size=1, batch_format="numpy"
        )
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)


def _no_documents(rank_plan: RankPlan) -> pa.Table:
    shards = ShardSet(Path(rank_plan.folder), "train")
    table = shards.take(np.empty(0, np.int64)).select(["id", "tokens", "windows", "num_tokens"])
    return table.append_column("epoch", pa.array([], pa.int64()))


def batches(rank_plan: RankPlan, feed: Feed, device: torch.device) -> Iterator[RankBatch]:
    """The rank's span batches, on its device, in step order."""
    size = rank_plan.plan.batch_documents
    for table in documents(rank_plan):
        table = table.combine_chunks()
        spans = feed.batch(table, table.column("epoch").to_numpy())
        digest = spans.digest()
        if device.type == "cuda":
            spans = spans.pin_memory()
        yield RankBatch(spans.to(device), rank_plan.start, len(table), size, digest)


@dataclass
class Ahead:
    """Runs an iterator in a thread, a few items ahead, and measures how long its reader waited.

    Attributes:
        items: what is iterated; used by the thread alone.
        waited_seconds: time the reader has waited so far.
    """

    items: Iterator[Any]
    waited_seconds: float = 0.0

    def __iter__(self) -> Iterator[Any]:
        """The items in order; an error of the thread is raised here."""
        ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD_BATCHES)
        stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(ready, stopped), daemon=True)
        thread.start()
        try:
            while True:
                begun = time.monotonic()
                item, error = _get(ready)
                self.waited_seconds += time.monotonic() - begun
                if error is not None:
                    if isinstance(error, StopIteration):
                        return
                    raise error
                yield item
        finally:
            stopped.set()
            while thread.is_alive():  # it may be waiting to put what nobody will read
                while not ready.empty():
                    ready.get_nowait()
                thread.join(timeout=0.05)

    def _run(self, ready: "queue.Queue[tuple[Any, BaseException | None]]", stopped: threading.Event) -> None:
        try:
            for item in self.items:
                if stopped.is_set():
                    return
                ready.put((item, None))
            ready.put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - raised again in the reader
            ready.put((None, error))


def _get(ready: "queue.Queue[tuple[Any, BaseException | None]]") -> tuple[Any, BaseException | None]:
    """The next item, with a word now and then when none comes."""
    waited = 0
    while True:
        try:
            return ready.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            waited += _PATIENCE_SECONDS
            get_logger().warning("no data for %d s; have the tasks that read shards a CPU left in the cluster?", waited)
