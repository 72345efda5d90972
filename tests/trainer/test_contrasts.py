"""Contrasts in tiles, whole and shared among workers, against the whole matrix; DeCLUTR's views, queue and losses."""

from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from groups import run_group
from measures import deviation
from messages import says
from tiny import contrastive, declutr, rows_of, tiny_encoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from declutr.trainer.objectives.base import SHARED_ROWS, Gathered, RowShard, implementation_of
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig
from declutr.trainer.objectives.declutr.objective import metric_learning_loss, metric_learning_problems, ntxent
from declutr.trainer.objectives.simcse import infonce
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import supcon
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.gradcache import GlobalCounts, GradCache
from declutr.trainer.step.task import TrainTask

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def dense(embeddings, temperature, queue=None, documents=None):
    """NT-Xent with every score in one matrix; with documents, other rows of a row's own one are no negatives."""
    rows = F.normalize(embeddings, dim=-1)
    others = rows if queue is None else torch.cat([rows, F.normalize(queue, dim=-1)])
    scores = rows @ others.T / temperature
    partner = torch.arange(len(rows)).roll(len(rows) // 2)[:, None]
    positive = scores.gather(1, partner)[:, 0]
    left_out = torch.zeros_like(scores, dtype=torch.bool).scatter(1, partner, True).fill_diagonal_(True)
    if documents is not None:
        owners = documents.repeat(2)
        left_out |= owners[:, None] == owners
    negatives = scores.masked_fill(left_out, torch.finfo(scores.dtype).min).logsumexp(dim=1)
    return -F.logsigmoid(positive - negatives).mean()


def cross_entropy(queries, columns, temperature, own_weight=0.0):
    """SimCSE's equations over the whole table; the weight is added to a row's score with its own hard negative."""
    scores = F.normalize(queries, dim=-1) @ F.normalize(columns, dim=-1).T / temperature
    own = torch.eye(len(queries), dtype=scores.dtype)
    extra = torch.cat([0 * own, own_weight * own], dim=1)[:, : scores.shape[1]]
    return F.cross_entropy(scores + extra, torch.arange(len(queries)))


def log_softmax(embeddings, labels, temperature):
    rows = F.normalize(embeddings, dim=-1)
    scores = (rows @ rows.T / temperature).masked_fill(torch.eye(len(rows), dtype=torch.bool), float("-inf"))
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    return -(scores.log_softmax(dim=1).where(same, 0).sum(dim=1) / same.sum(dim=1)).mean()


def embeddings(pairs, size=12, dtype=torch.float64, seed=0):
    """Pairs that resemble each other, so that terms are neither all won nor all lost."""
    anchors, noise = randn(2, pairs, size, seed=seed)
    return torch.cat([anchors, anchors + 1.5 * noise]).to(dtype).requires_grad_(True)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


WHOLE = 1024


def tiles(rows):
    return patch("declutr.trainer.objectives.base._CPU_TILE", rows)


def value_and_gradient(loss, rows, *arguments, tile=WHOLE):
    with tiles(tile):
        value = loss(rows, *arguments)
    (gradient,) = torch.autograd.grad(value, rows)
    return value, gradient


@pytest.mark.parametrize("tile", [1, WHOLE])
def test_loss_without_a_negative_is_zero_and_has_no_gradient_and_a_queue_has_negatives(tile):
    for name, loss in {
        "one pair": lambda rows: ntxent(rows[:2], 0.05),
        "one document": lambda rows: ntxent(rows, 0.2, documents=torch.zeros(3)),
        "one query": lambda rows: infonce(rows[:1], rows[1:2].detach(), 0.05),
    }.items():
        value, gradient = value_and_gradient(loss, embeddings(3), tile=tile)
        assert value == 0, name
        assert not gradient.any(), name
    rows, queue = embeddings(1), embeddings(3, seed=1).detach()
    expected = value_and_gradient(dense, rows, 0.05, queue)
    assert deviation(value_and_gradient(ntxent, rows, 0.05, queue, tile=tile), expected) < 1e-10


def test_lost_and_won_terms_keep_their_digits():
    """At 5e-4 a lost term is in the thousands, a won one underflows: both exact, no gradient is NaN."""
    anchors = torch.eye(6, 8, dtype=torch.float64)
    for positives in (anchors, -anchors, anchors.roll(1, 0)):
        rows = torch.cat([anchors, positives]).float().requires_grad_(True)
        exact = rows.detach().double().requires_grad_(True)
        value, gradient = value_and_gradient(ntxent, rows, 5e-4, tile=5)
        expected = value_and_gradient(dense, exact, 5e-4)
        assert torch.allclose(value.double(), expected[0], rtol=1e-5)
        assert torch.isfinite(gradient).all()
        assert torch.allclose(gradient.double(), expected[1], rtol=1e-5, atol=1e-3)


class Watched(TorchDispatchMode):
    """Elements of the largest tensor of any operation, backward included, and of all matrix products."""

    largest = products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        sizes = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tensors]
        self.largest = max([self.largest, *sizes])
        if function.overloadpacket == torch.ops.aten.mm:
            self.products += result.numel()
        return result


@pytest.mark.parametrize("queued", [0, 300])
def test_no_matrix_beyond_a_tile(queued):
    rows, queue, tile = embeddings(200, size=4), embeddings(queued, size=4, seed=1).detach()[:queued], 32
    with Watched() as seen, tiles(tile):
        ntxent(rows, 0.05, queue).backward()
    assert seen.largest == max(tile * tile, rows.numel(), queue.numel())


def test_half_precision_embeddings_are_normalised_and_compared_in_float32():
    """The embeddings are those that autocast computed; the loss is that of the same numbers in float32."""
    half, queue = embeddings(19, dtype=torch.bfloat16), embeddings(8, seed=1, dtype=torch.bfloat16).detach()
    exact = half.detach().float().requires_grad_(True)
    value, gradient = value_and_gradient(ntxent, half, 0.05, queue)
    expected, exact_gradient = value_and_gradient(ntxent, exact, 0.05, queue.float())
    assert value.dtype == torch.float32
    assert value == expected
    assert torch.equal(gradient, exact_gradient.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # in the backward pass too, it changes nothing
        assert torch.equal(value_and_gradient(ntxent, exact, 0.05, queue.float())[1], exact_gradient)


ROWS = 11
LABELS = torch.tensor([3, 3, 1, 0, 2, 1, 1, 0, 2, 3, 5])
# three rows of one document, two of another, and documents of one row; all 64 bits count
OWNERS = torch.tensor([5, 5, 1, 0, 2, 5, 1, -7, 7, 3, 6]) << 60


def stacked(views):
    return torch.cat([views[:, 0], views[:, 1]])


# A loss in tiles, its plain writing, and the arguments of both, from views.
LOSSES = {
    "ntxent": (ntxent, dense, lambda v: (stacked(v), 0.2, None)),
    "queue": (ntxent, dense, lambda v: (stacked(v), 0.2, randn(7, 6, seed=3).to(v.dtype))),
    "other documents": (*(partial(loss, documents=OWNERS) for loss in (ntxent, dense)), lambda v: (stacked(v), 0.2)),
    "infonce": (infonce, cross_entropy, lambda v: (v[:, 0], v[:, 1], 0.1, 0.0)),
    "hard negatives": (infonce, cross_entropy, lambda v: (v[:, 0], torch.cat([v[:, 1], v[:, 1].roll(1, 1)]), 0.1, 0.7)),
    "supcon": (supcon, log_softmax, lambda v: (stacked(v), LABELS.repeat(2), 0.3)),
}


# Rows of each worker (one has none); tiles of one row, ragged at the end, cutting at M and beside it, and one for all.
BOUNDS = {1: [(0, 11)], 2: [(0, 5), (5, 11)], 3: [(0, 4), (4, 4), (4, 11)]}
TILES = {1: (1, 3, 5, 7, 10, 11, 12, 20, 21, 22, WHOLE), 2: (1, 3, 8, WHOLE), 3: (1, 3, 8, WHOLE)}
COUNTED_ROWS = SHARED_ROWS // 8


def computed(comm, dtype):
    """Values and gradients of the losses, of the rows of this rank, by name and tile; one worker shares nothing."""
    (start, end), results = BOUNDS[comm.size][comm.rank], {}
    row_shard = RowShard(comm, start, end, ROWS) if comm.size > 1 else None
    for name, (loss, _, arguments) in LOSSES.items():
        for tile in TILES[comm.size]:
            own = randn(ROWS, 2, 6).to(dtype)[start:end].requires_grad_()
            table = comm.all_gather(own.flatten(1), start, ROWS).view(ROWS, 2, -1)
            if table.requires_grad:
                table.retain_grad()
            with tiles(tile):
                value = loss(*arguments(table), row_shard=row_shard)
            value.backward()
            # layers between the views and the loss must see this rank's rows alone
            assert not torch.cat([table.grad[:start], table.grad[end:]]).any()
            assert value.dtype == own.grad.dtype == dtype
            results[name, tile] = value.item(), own.grad
    return results


def counted(comm):
    """Elements of scores that this rank computes, forward and backward, for shared rows and for all."""
    products, rows = [], COUNTED_ROWS
    start, end = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
    for row_shard in (None, RowShard(comm, start, end, rows)):
        table = torch.randn(2 * rows, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with Watched() as seen, tiles(16):
            ntxent(table, 0.1, row_shard=row_shard).backward()
        products.append(seen.products)
    return products


def out_of_memory(comm):
    """What each rank has of two exchanges, before which the last one ran out of memory, and its failures."""

    def compute():
        if comm.rank == comm.size - 1:
            raise torch.OutOfMemoryError("a tile does not fit")
        return torch.ones(1, 2 * comm.size)

    row_shard = RowShard(comm, comm.rank, comm.rank + 1, comm.size)
    exchanges = [row_shard.complete(compute, torch.zeros(2 * comm.size, 3)) for _ in range(2)]
    return torch.cat(exchanges).isnan().tolist(), list(map(str, row_shard.failures))


def on_ranks(comm):
    losses = {dtype: computed(comm, dtype) for dtype in LIMITS}
    return {"losses": losses, "products": counted(comm), "memory": out_of_memory(comm)}


@cache
def results(size):
    return run_group(size, on_ranks) if size > 1 else [on_ranks(Communicator())]


@pytest.mark.dist
@pytest.mark.parametrize("size", BOUNDS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_shares_in_any_tiles_add_up_to_the_plain_writing(size, dtype):
    ranks = [rank["losses"][dtype] for rank in results(size)]
    for name, (_, plain, arguments) in LOSSES.items():
        views = randn(ROWS, 2, 6).requires_grad_()
        expected = plain(*arguments(views))
        expected.backward()
        for tile in TILES[size]:
            assert {rank[name, tile][0] for rank in ranks} == {ranks[0][name, tile][0]}, name
            assert ranks[0][name, tile][0] == pytest.approx(expected.item(), rel=LIMITS[dtype]), name
            gradient = torch.cat([rank[name, tile][1] for rank in ranks])
            assert deviation([gradient], [views.grad]) < LIMITS[dtype], (name, tile)


@pytest.mark.dist
def test_a_worker_computes_its_rows_alone_and_leaves_no_other_waiting_without_memory():
    """M^2 / W scores in each of both passes; all of them have half of M^2, because scores are symmetric."""
    first, second = (rank["memory"] for rank in results(2))
    assert first == ([[False, True, False, True]] * 2, [])
    assert second == (first[0], ["a tile does not fit"])
    scores = (2 * COUNTED_ROWS) ** 2
    for whole, row_shard in (rank["products"] for rank in results(3)):
        assert row_shard == pytest.approx(2 * scores / 3, rel=0.02)
        assert whole == pytest.approx(scores, rel=0.1)


@pytest.mark.dist
def test_step_shares_the_rows_of_losses_that_can_be_shared():
    shared = DeclutrConfig(), SimcseConfig(), SupconConfig(), SupconConfig(labels=False, reference_supcon=True)
    by_name = DeclutrConfig(loss={"kind": "pytorch_metric_learning", "loss": "NTXentLoss"})
    for config in (*shared, by_name, SupconConfig(reference_supcon=True)):
        objective = implementation_of(config)(config, RunContext(), 4)
        task = TrainTask(encoder=tiny_encoder(), objective=objective, comm=Communicator(1, 2), seed=0)
        passes = GradCache(task, 1, rows_of(torch.empty(0), SHARED_ROWS // 2), [])
        counts = GlobalCounts(selected=0, first_row=SHARED_ROWS // 2, num_rows=SHARED_ROWS)
        assert (passes._row_shard(counts) is not None) == (config in shared), config


def test_declutr_views_are_anchors_and_mean_positives():
    """Anchor beside the mean of its own positives; with a second forward it is the unmasked anchor that counts."""
    masked, plain, positives = randn(4, 5), randn(4, 5, seed=1), randn(12, 5, seed=2)
    for unmasked, spans in ((False, [masked, positives]), (True, [masked, plain, positives])):
        objective = declutr(DeclutrConfig(contrast_unmasked_anchors=unmasked), num_positives=3)
        views = objective.views(torch.cat(spans), rows_of(torch.cat(spans), 4))
        assert torch.equal(views[:, 0], plain if unmasked else masked)
        assert deviation([views[:, 1]], [positives.view(4, 3, 5).mean(1)]) < 1e-15


def test_queue_holds_the_latest_and_only_as_negatives():
    objective = declutr(DeclutrConfig(queue_size=6, loss={"kind": "ntxent", "temperature": 0.3}), 1, 1, size=5)
    assert objective.remembers
    seen = torch.empty(0, 5, dtype=torch.float64)
    for seed in range(3):
        views = randn(2, 2, 5, seed=seed).requires_grad_()
        value, embeddings = contrastive(objective, views), torch.cat([views[:, 0], views[:, 1]]).detach()
        assert deviation([value], [ntxent(embeddings, 0.3, seen)]) < 1e-12
        before = objective.queue
        assert before is None or torch.equal(before, seen)  # the loss itself changes nothing
        objective.remember(Gathered(views).detach())
        assert not objective.queue.requires_grad
        seen = torch.cat([seen, embeddings])[-6:]
        assert torch.equal(objective.queue, seen)
    twin = declutr(objective.config, 1, 1, size=5)
    twin.restore(objective.state())
    assert torch.equal(twin.queue, objective.queue)
    twin.restore({})
    assert twin.queue is None
    plain = declutr(DeclutrConfig(), 1, 1)
    assert not plain.remembers
    assert plain.state() == {}
    with pytest.raises(RuntimeError, match=r"unexpected classifier\.weight"):
        plain.restore({"classifier.weight": torch.zeros(2), "queue": torch.zeros(1, 2)})


def test_losses_and_miners_that_cannot_be_used_are_named_and_a_miner_chooses_what_counts():
    def named(loss, **settings):
        return MetricLearningConfig(kind="pytorch_metric_learning", loss=loss, **settings)

    def metric_loss(loss, **settings):
        return partial(metric_learning_loss(named(loss, **settings)), seed=1)

    refused = {
        ("NTXentLoss", "loss_arguments", "temperatur"): ("'temperatur'",),
        ("ArcFaceLoss", "loss_arguments", "num_classes"): ("missing", "'embedding_size'"),
        ("ProxyNCALoss", "loss_arguments", "num_classes embedding_size"): ("class weights",),
        ("SubCenterArcFaceLoss", "loss_arguments", ""): ("KeyError", "'num_classes'"),
        ("VICRegLoss", "loss_arguments", ""): ("not supported",),
    }
    for (loss, setting, names), facts in refused.items():
        values = dict.fromkeys(names.split(), 4)
        says(metric_learning_problems(named(loss, **{setting: values})), f"objective.loss.loss = {loss}", *facts)
    says(
        metric_learning_problems(named("NTXentLoss", miner="BaseMiner")),
        "objective.loss.miner = BaseMiner",
        "NotImplementedError",
    )
    before = torch.random.get_rng_state()
    assert metric_learning_problems(named("NTXentLoss", miner="DistanceWeightedMiner")) == []
    assert torch.equal(before, torch.random.get_rng_state())
    plain, mined = metric_loss("TripletMarginLoss"), metric_loss("TripletMarginLoss", miner="BatchHardMiner")
    assert mined(randn(12, 5)) > plain(randn(12, 5))
    drawn, before = metric_loss("TripletMarginLoss", miner="DistanceWeightedMiner"), torch.random.get_rng_state()
    assert len({drawn(randn(12, 5)).item() for _ in range(3)}) == 1  # each worker takes the gradient of the same loss
    assert drawn(randn(12, 5)) != drawn(randn(12, 5), seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
