"""Losses of which each worker computes a row_shard: value and gradient are those of one process that computes all."""

import pytest
import torch
from groups import run_group
from measures import deviation
from tiny import rows_of, tiny_encoder

from declutr.trainer.objectives.base import SHARED_ROWS, RowShard
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr, ntxent
from declutr.trainer.objectives.simcse import Simcse, infonce
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, supcon
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.gradcache import GlobalCounts, GradCache
from declutr.trainer.step.task import TrainTask

pytestmark = pytest.mark.dist
ROWS = 11
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def ntxent_of(views, row_shard, tile):
    return ntxent(torch.cat([views[:, 0], views[:, 1]]), 0.2, None, tile, row_shard)


def queued(views, row_shard, tile):
    queue = torch.randn(7, views.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return ntxent(torch.cat([views[:, 0], views[:, 1]]), 0.2, queue.to(views.dtype), tile, row_shard)


def other_documents(views, row_shard, tile):
    """Three rows of one document, two of another, and documents of one row; queued rows of three of them."""
    queue = torch.randn(7, views.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    documents, queued = torch.tensor([5, 5, 1, 0, 2, 5, 1, -9, 7, 3, 6]), torch.tensor([5, 8, -9, 9, 10, 0, 11])
    rows = torch.cat([views[:, 0], views[:, 1]])
    return ntxent(rows, 0.2, queue.to(views.dtype), tile, row_shard, documents, queued)


def simcse(views, row_shard, tile):
    return infonce(views[:, 0], views[:, 1], 0.1, 0.0, tile, row_shard)


def hard_negatives(views, row_shard, tile):
    return infonce(views[:, 0], torch.cat([views[:, 1], views[:, 1].roll(1, 1)]), 0.1, 0.7, tile, row_shard)


def labelled(views, row_shard, tile):
    labels = torch.tensor([3, 3, 1, 0, 2, 1, 1, 0, 2, 3, 5]).repeat(2)
    return supcon(torch.cat([views[:, 0], views[:, 1]]), labels, 0.3, tile, row_shard)


LOSSES = {each.__name__: each for each in (ntxent_of, queued, other_documents, simcse, hard_negatives, labelled)}


def views_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 2, 6, generator=generator, dtype=torch.float64).to(dtype)


def computed(comm, dtype, bounds):
    """Values and gradients of the losses, of the rows of this rank, by name and tile."""
    start, end = bounds[comm.rank]
    found = {}
    for name, loss in LOSSES.items():
        for tile in (1, 3, 8, None):
            own = views_of(dtype)[start:end].requires_grad_()
            table = comm.all_gather(own.flatten(1), start, ROWS).view(ROWS, 2, -1)
            if table.requires_grad:
                table.retain_grad()
            value = loss(table, RowShard(comm, start, end, ROWS), tile)
            value.backward()
            # layers between the views and the loss must see this rank's rows alone
            assert not torch.cat([table.grad[:start], table.grad[end:]]).any()
            found[name, tile] = value.item(), own.grad
    return found


BOUNDS = {1: [(0, 11)], 2: [(0, 5), (5, 11)], 3: [(0, 4), (4, 4), (4, 11)]}


@pytest.mark.parametrize("size", BOUNDS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_shares_add_up_to_the_whole_loss(size, dtype):
    """A worker may have no rows."""
    bounds = BOUNDS[size]
    ranks = run_group(size, computed, dtype, bounds) if size > 1 else [computed(Communicator(), dtype, bounds)]
    for name, loss in LOSSES.items():
        views = views_of(torch.float64).requires_grad_()
        expected = loss(views, None, None)
        expected.backward()
        for tile in (1, 3, 8, None):
            assert {rank[name, tile][0] for rank in ranks} == {ranks[0][name, tile][0]}, name
            assert ranks[0][name, tile][0] == pytest.approx(expected.item(), rel=LIMITS[dtype]), name
            gradient = torch.cat([rank[name, tile][1] for rank in ranks])
            assert deviation([gradient], [views.grad]) < LIMITS[dtype], (name, tile)


def counted(comm, rows):
    """Elements of scores that this rank computes, forward and backward, for shared rows and for all."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket == torch.ops.aten.mm:
                self.elements += result.numel()
            return result

    found = []
    start, end = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
    for row_shard in (None, RowShard(comm, start, end, rows)):
        table = torch.randn(2 * rows, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with Products() as seen:
            ntxent(table, 0.1, None, 16, row_shard).backward()
        found.append(seen.elements)
    return found


def test_a_worker_computes_its_rows_alone():
    """M^2 / W scores in each of both passes; all of them have half of M^2, because scores are symmetric."""
    rows = SHARED_ROWS // 8
    for whole, row_shard in run_group(3, counted, rows):
        assert row_shard == pytest.approx(2 * (2 * rows) ** 2 / 3, rel=0.02)
        assert whole == pytest.approx((2 * rows) ** 2, rel=0.1)


PML = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}


@pytest.mark.parametrize(
    ("kind", "config", "shared"),
    [
        (Declutr, DeclutrConfig(), True),
        (Declutr, DeclutrConfig(loss=PML), False),
        (Simcse, SimcseConfig(), True),
        (Supcon, SupconConfig(), True),
        (Supcon, SupconConfig(labels=False, reference_supcon=True), True),
        (Supcon, SupconConfig(reference_supcon=True), False),
    ],
)
def test_step_shares_the_rows_of_losses_that_can_be_shared(kind, config, shared):
    """A large batch of two workers; what the losses compute of it is tested above."""
    objective = kind(config, RunContext(), 4)
    cache = GradCache(TrainTask(encoder=tiny_encoder(), objective=objective, comm=Communicator(1, 2), seed=0), 1)
    counts = GlobalCounts(selected=0, first_row=SHARED_ROWS // 2, num_rows=SHARED_ROWS)
    assert (cache._row_shard(rows_of(torch.empty(0), SHARED_ROWS // 2), counts) is not None) == shared


def out_of_memory(comm):
    """What each rank has of an exchange before which the last one ran out of memory."""

    def compute():
        if comm.rank == comm.size - 1:
            raise torch.OutOfMemoryError("a tile does not fit")
        return torch.ones(1, 4)

    row_shard = RowShard(comm, comm.rank, comm.rank + 1, comm.size)
    try:
        return row_shard.complete(compute, torch.zeros(2 * comm.size, 3)).tolist()
    except torch.OutOfMemoryError:
        return "raised"


def test_a_worker_without_memory_leaves_no_other_waiting():
    first, second = run_group(2, out_of_memory)
    assert second == "raised"
    assert [value == value for value in first[0]] == [True, False, True, False]
