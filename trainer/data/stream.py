"""Streams this rank's documents from the shards through Ray Data, step by step, in the plan's order.

Each rank runs a separate Dataset over its slice of the plan. Its input is chunk numbers. A task maps the shards into
memory and takes the chunk's documents. The output is blocks, in order. No rank waits for another, any world size reads
the same global batches, and a resumed run starts at its step without reading earlier documents.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from ray.data import DataContext, ExecutionResources

from declutr.common.console.logs import get_logger
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import Collator, RankBatch, collated
from declutr.trainer.data.chunks import RankPlan, fetched, read_chunk

_MOST_CHUNKS = 512  # of one Dataset: Ray Data spends about 1 ms on each before it returns the first block
_AHEAD_BATCHES = 4
_PACE_SECONDS = 0.1
_PATIENCE_SECONDS = 30
_STORE_SHARE = 0.5  # of the object store; the rest is for blocks that are being read
_LEAST_STORE_BYTES = 2**26  # a few blocks of long documents


class _Pace:
    """Limits how often Ray Data's executor polls its tasks.

    The executor is a thread of the worker. If finished blocks are waiting to be read, which is the normal case, it
    polls without a pause and holds the interpreter lock that the training thread needs.

    It has the methods of Ray's ExecutionCallback, which has no public name.
    """

    def before_execution_starts(self, executor: Any) -> None:
        """Does nothing."""

    def on_execution_step(self, executor: Any) -> None:
        """Pauses after each poll unless the reader waits for data."""
        if not executor._consumer_idling():
            time.sleep(_PACE_SECONDS)

    def after_execution_succeeds(self, executor: Any) -> None:
        """Does nothing."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Does nothing."""


def limit_resources(
    streams: int,  # number of Datasets of all ranks
    cpus: float,  # CPUs of the cluster that no worker reserves
    store_bytes: float,  # size of the cluster's object store
) -> None:
    """Limits each Dataset of this process to its share of what the readers of all ranks may use.

    Ray Data takes the whole cluster as its own. With one Dataset a rank, all of them together would start as many tasks
    as the cluster has CPUs for each, and fill the object store, which then spills to disk.
    """
    share = ExecutionResources(
        cpu=max(1.0, cpus // streams), object_store_memory=max(_LEAST_STORE_BYTES, _STORE_SHARE * store_bytes / streams)
    )
    DataContext.get_current().execution_options.resource_limits = share


def documents(
    rank_plan: RankPlan,  # slice of the plan
    tasks: bool = True,  # Ray Data reads all chunks but the first. False: this process reads all.
) -> Iterator[pa.Table]:
    """The rank's documents, one table a step; blocks may end anywhere, so they are joined and cut here."""
    per_step = rank_plan.end - rank_plan.start
    if per_step == 0:  # more ranks than documents: this one only joins the all-reduces
        shards, nothing = ShardSet(Path(rank_plan.folders[0]), "train", part=rank_plan.part), np.empty(0, np.int64)
        table = fetched(shards, nothing, nothing, rank_plan.fetch)
        yield from ([table] * (rank_plan.last_step - rank_plan.first_step))
        return
    buffer: list[pa.Table] = []
    for block in _blocks(rank_plan) if tasks else _read_here(rank_plan, range(rank_plan.num_chunks)):
        buffer.append(block)
        available = sum(len(table) for table in buffer)
        if available >= per_step:
            joined, at = pa.concat_tables(buffer), 0
            while available - at >= per_step:
                yield joined.slice(at, per_step)
                at += per_step
            buffer = [joined.slice(at)] if available > at else []


def _blocks(rank_plan: RankPlan) -> Iterator[pa.Table]:
    """The blocks of all chunks in order.

    The first chunk is read in this process. The processes that read the others take seconds to start, and on few cores
    they would delay the first step by as much. They start when that step is done: only then are more than `alone`
    documents requested.
    """
    alone = (_AHEAD_BATCHES + 2) * (rank_plan.end - rank_plan.start)
    prefetcher = Prefetcher(_read_by_tasks(rank_plan, 1))
    try:
        block = next(_read_here(rank_plan, range(1)))
        yield block.slice(0, alone)
        prefetcher.begin()
        yield block.slice(alone)
        yield from prefetcher
    finally:
        prefetcher.close()


def _read_here(rank_plan: RankPlan, chunks: range) -> Iterator[pa.Table]:
    """The blocks of these chunks, read in this process."""
    return (read_chunk({"id": np.array([number])}, rank_plan, 0) for number in chunks)


def _read_by_tasks(rank_plan: RankPlan, first: int) -> Iterator[pa.Table]:
    """The blocks of the chunks from `first` on, read by one Dataset after the other."""
    context = DataContext.get_current()
    context.execution_options.preserve_order = True  # else blocks come as tasks end, and steps differ
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    if _Pace not in context.custom_execution_callback_classes:
        context.custom_execution_callback_classes.append(_Pace)
    for begin in range(first, rank_plan.num_chunks, _MOST_CHUNKS):
        number = min(_MOST_CHUNKS, rank_plan.num_chunks - begin)
        dataset = ray.data.range(number, override_num_blocks=number).map_batches(
            read_chunk, fn_kwargs={"rank_plan": rank_plan, "first": begin}, batch_size=1, batch_format="numpy"
        )
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)


def batches(rank_plan: RankPlan, collator: Collator, device: torch.device, tasks: bool = True) -> Iterator[RankBatch]:
    """The rank's batches, on its device, in step order; `tasks` as for `documents`."""
    for table in documents(rank_plan, tasks):
        table = table.combine_chunks()
        epochs = table.column("epoch").to_numpy()
        yield collated(collator, table, epochs, rank_plan.start, rank_plan.plan.canonical_documents).to(device)


@dataclass
class Prefetcher:
    """Runs an iterator in a thread, a few items ahead, and measures how long its reader waited."""

    items: Iterator[Any]  # the iterator; only the thread uses it
    waited_seconds: float = 0.0  # time in seconds that the reader has waited so far
    _ready: "queue.Queue[tuple[Any, BaseException | None]]" = field(default_factory=lambda: queue.Queue(_AHEAD_BATCHES))
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread before the first item is requested."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._ready, self._stopped), daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        """The items in order, once; an error of the thread is raised here."""
        self.begin()
        try:
            while True:
                started = time.monotonic()
                item, error = _get(self._ready)
                self.waited_seconds += time.monotonic() - started
                if error is not None:
                    if isinstance(error, StopIteration):
                        return
                    raise error
                yield item
        finally:
            self.close()

    def close(self) -> None:
        """Stops the thread if it was started; items that were not read are lost."""
        self._stopped.set()  # the thread looks at it between two items
        while self._thread is not None and self._thread.is_alive():  # it may wait for room in the queue
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.05)

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
    """The next item; logs a warning whenever none has arrived for `_PATIENCE_SECONDS`."""
    waited = 0
    while True:
        try:
            return ready.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            waited += _PATIENCE_SECONDS
            get_logger().warning("no data for %d s; check that a CPU is free for tasks that read shards", waited)
