"""Any number of workers: the same documents with the same spans at every step."""

import dataclasses
import time

import pytest
import ray
import tinyruns as runs
import torch
from processes import until
from ray.data import DataContext

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_parts
from declutr.trainer.data import stream
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import Plan
from declutr.trainer.data.stream import Prefetcher, batches, documents
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]
STEPS = 40  # more than an epoch of 257 documents
BATCH = 8


@pytest.fixture(scope="module")
def collator(data):
    plan = RunPlan.of(runs.train_config(data, "unused"))
    return build_parts(plan, Communicator(), torch.device("cpu")).collators[""]


def rank_plans(data, world, first=0, last=STEPS, chunk_steps=None):
    shards = ShardSet(data, "train")
    plan = Plan(seed=0, num_documents=shards.num_documents, batch_documents=BATCH)
    plans = [rank_plan(plan, shards, rank, world, first, last) for rank in range(world)]
    return [dataclasses.replace(p, chunk_steps=chunk_steps or p.chunk_steps) for p in plans]


def spans_of(batch):
    """Each span as (ids, masked places, their tokens): anchors first, then positives."""
    pieces = [batch.spans.span_slice(i, i + 1) for i in range(batch.spans.num_spans)]
    return [(p.input_ids.tolist(), p.selected.tolist(), p.labels.tolist()) for p in pieces]


def global_steps(data, collator, world, **sizes):
    """What all ranks together read at each step, through Ray Data, in the order of the global batch."""
    ranks = [list(Prefetcher(batches(p, collator, torch.device("cpu")))) for p in rank_plans(data, world, **sizes)]
    assert len({len(rank) for rank in ranks}) == 1
    steps = []
    for parts in zip(*ranks, strict=True):
        assert sum(part.num_rows for part in parts) == 2 * BATCH  # the anchors
        cut = [(spans_of(part), part.num_rows) for part in parts]
        anchors = [span for spans, first in cut for span in spans[:first]]
        steps.append((anchors, [span for spans, first in cut for span in spans[first:]]))
    return steps


@pytest.mark.nightly
def test_nothing_spins_while_blocks_wait_for_their_reader(data, monkeypatch):
    looks, waiting = [], []

    class Looks(stream._Pace):
        def on_execution_step(self, executor):
            looks.append(time.monotonic())
            waiting.append(not executor._consumer_idling())

    context = DataContext.get_current()
    monkeypatch.setattr(context, "custom_execution_callback_classes", [Looks])
    (plan,) = rank_plans(data, 1, last=150, chunk_steps=1)
    steps = documents(plan)
    for _ in range(2):  # the first chunk needs no task, the second does
        next(steps)
    # Blocks that nobody reads. On a busy machine the processes that read them need a minute to start.
    until(lambda: sum(waiting[:-1]) >= 5, seconds=180)
    steps.close()
    pauses = [after - at for at, after, full in zip(looks, looks[1:], waiting, strict=False) if full]
    assert min(pauses) >= stream._PACE_SECONDS


def test_every_world_reads_the_same_spans_at_every_step(data, collator, monkeypatch):
    alone = global_steps(data, collator, 1)
    assert len(alone) == STEPS
    assert all(len(anchors) == 2 * BATCH and len(positives) == 4 * BATCH for anchors, positives in alone)
    assert any(places for _, places, _ in alone[0][0]), "nothing is masked"
    assert global_steps(data, collator, 2, chunk_steps=7) == alone
    monkeypatch.setattr("declutr.trainer.data.stream._MOST_CHUNKS", 3)  # several Datasets, one after the other
    assert global_steps(data, collator, 3, chunk_steps=11) == alone


def test_a_stream_can_begin_at_any_step_with_more_ranks_than_documents(data, collator):
    alone = global_steps(data, collator, 1, first=0, last=36)
    assert global_steps(data, collator, BATCH + 1, first=30, last=36) == alone[30:]


@ray.remote(num_cpus=6)
class Holder:
    """Has all of the session's CPUs."""

    def holds(self):
        return True


@pytest.mark.nightly
def test_the_first_chunk_waits_for_no_task(data):
    holder = Holder.remote()
    assert ray.get(holder.holds.remote())
    (plan,) = rank_plans(data, 1, chunk_steps=5)
    steps = documents(plan)
    begun = [next(steps) for _ in range(5)]
    ray.kill(holder)
    rest = list(steps)
    assert len(rest) == STEPS - 5
    (alone,) = rank_plans(data, 1)
    ids = [table.column("id").to_pylist() for table in begun + rest]
    assert ids == [table.column("id").to_pylist() for table in documents(alone)]
