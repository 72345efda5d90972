"""A rank's slice of the plan, cut into the chunks that tasks read. No torch, so that tasks start in a second."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.errors import ShardError
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.content import AudioContent
from declutr.pipeline.shards.manifest import MANIFEST
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.plan import Plan

_CHUNK_DOCUMENTS = 1024  # tasks with fewer are mostly overhead
_CHUNK_VALUES = 16 * 1024 * 1024  # tokens or energies: a chunk of long documents must easily fit the object store


Part = tuple[float, int]  # A share of the documents, and the seed that chooses them
Fetch = Callable[[pa.Table, NDArray[np.int64], ShardSet], pa.Table]
"""Changes rows of the shards, given the epoch of each and the shards; it must not import torch."""
_shards: dict[tuple[tuple[str, ...], Part | None, tuple[int, ...]], ShardSet] = {}  # opened once per process


@dataclass(frozen=True)
class RankPlan:
    """A rank's slice of the plan, cut into chunks of whole steps."""

    plan: Plan  # the run's plan
    folders: tuple[str, ...]  # the shards of each corpus, on the rank's host
    start: int  # first position of the global batch that the rank reads
    end: int  # position after its last
    first_step: int  # 0-based step with which the stream starts
    last_step: int  # step after the last
    chunk_steps: int  # number of steps that a chunk covers
    # where `data` of the run names them. The folder of an address is a copy, which tasks on other hosts download too.
    places: tuple[str, ...] = ()
    # changes the rows in the task that reads them, given their epochs; None: they stay as they are.
    fetch: Fetch | None = None
    part: Part | None = None  # the part of the shards that the run reads; None: all
    # times of the manifests at the start of the run; a later run may find other shards in the same folders.
    made_ns: tuple[int, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Number of chunks from the first step to the last."""
        return -(-(self.last_step - self.first_step) // self.chunk_steps)

    def chunk(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and document numbers of a chunk, in order."""
        first = self.first_step + number * self.chunk_steps
        return self.plan.documents(first, min(first + self.chunk_steps, self.last_step), self.start, self.end)


def rank_plan(
    plan: Plan,
    shards: ShardSet,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
    places: tuple[str, ...] = (),
    fetch: Fetch | None = None,
) -> RankPlan:
    """The slice of `rank`, with chunks large enough for low overhead and small enough for memory."""
    start, end = plan.slice(rank, world_size)
    totals, content = shards.manifest.totals, shards.manifest.content
    values = content.num_mel_bins if isinstance(content, AudioContent) else 1  # a sound counts its frames
    mean_values = max(1, totals["num_tokens"] * values // max(1, totals["kept"]))
    documents = max(1, min(_CHUNK_DOCUMENTS, _CHUNK_VALUES // mean_values))
    chunk_steps = max(1, documents // max(1, end - start))
    folders = tuple(map(str, shards.folders))
    # a process of tasks outlives a run, whose shards may be replaced
    made_ns = tuple((folder / MANIFEST).stat().st_mtime_ns for folder in shards.folders)
    steps = first_step, last_step, chunk_steps
    return RankPlan(plan, folders, start, end, *steps, places, fetch, shards.part, made_ns)


def read_chunk(rows: dict[str, np.ndarray], rank_plan: RankPlan, first: int) -> pa.Table:
    """Reads a chunk as a Ray Data task: from its number, counted from `first`, to its documents and epochs."""
    opened = rank_plan.folders, rank_plan.part, rank_plan.made_ns
    if opened not in _shards:
        folder, *other_folders = folders = [Path(path) for path in rank_plan.folders]
        for missing, place in zip(folders, rank_plan.places, strict=False):
            if missing.exists():
                continue
            if is_remote(place) and Folder(place).cached(missing.parent) != missing:
                raise ShardError(f"{place} holds other shards than at the start of the run")
        _shards[opened] = ShardSet(folder, "train", look=False, part=rank_plan.part, others=other_folders)
    epochs, documents = rank_plan.chunk(first + int(rows["id"][0]))
    return fetched(_shards[opened], documents, epochs, rank_plan.fetch)


def fetched(shards: ShardSet, documents: np.ndarray, epochs: np.ndarray, fetch: Fetch | None = None) -> pa.Table:
    """Rows of shards as a collator reads them: without their origin, with the epoch, changed by `fetch`."""
    table = shards.take(documents)
    table = table if fetch is None else fetch(table, epochs, shards)
    return table.drop_columns(["source", "offset"]).append_column("epoch", pa.array(epochs, pa.int64()))
