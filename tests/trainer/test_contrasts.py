"""Contrasts in tiles, whole and shared among workers, against the whole matrix; DeCLUTR's views, queue and losses."""

from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from groups import run_group
from measures import deviation
from messages import all_of
from tiny import contrastive, declutr, rows_of, tiny_encoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from declutr.trainer.objectives.base import SHARED_ROWS, Gathered, RowShard
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig
from declutr.trainer.objectives.declutr.objective import Declutr, metric_learning_loss, ntxent
from declutr.trainer.objectives.simcse import Simcse, infonce
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, supcon
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
    """SupCon's equation over the whole table."""
    rows = F.normalize(embeddings, dim=-1)
    scores = (rows @ rows.T / temperature).masked_fill(torch.eye(len(rows), dtype=torch.bool), float("-inf"))
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    return -(scores.log_softmax(dim=1).where(same, 0).sum(dim=1) / same.sum(dim=1)).mean()


def embeddings(pairs, size=12, dtype=torch.float64, seed=0):
    """Pairs that resemble each other, so that terms are neither all won nor all lost."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    noise = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    return torch.cat([anchors, anchors + 1.5 * noise]).to(dtype).requires_grad_(True)


WHOLE = 1024


def tiles(rows):
    """Tiles of this many rows and columns."""
    return patch("declutr.trainer.objectives.base._CPU_TILE", rows)


def value_and_gradient(loss, rows, *arguments, tile=WHOLE):
    with tiles(tile):
        value = loss(rows, *arguments)
    (gradient,) = torch.autograd.grad(value, rows)
    return value, gradient


NOTHING = {
    "one pair": lambda rows: ntxent(rows[:2], 0.05),
    "one document": lambda rows: ntxent(rows, 0.2, documents=torch.zeros(3)),
    "one query": lambda rows: infonce(rows[:1], rows[1:2].detach(), 0.05),
}


@pytest.mark.parametrize("tile", [1, WHOLE])
@pytest.mark.parametrize("loss", NOTHING.values(), ids=list(NOTHING))
def test_loss_without_a_negative_is_zero_and_has_no_gradient(loss, tile):
    value, gradient = value_and_gradient(loss, embeddings(3), tile=tile)
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("tile", [1, WHOLE])
def test_queue_is_the_negatives_of_a_single_pair(tile):
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
    pairs, tile = 200, 32
    rows, queue = embeddings(pairs, size=4), embeddings(queued, size=4, seed=1).detach()[:queued]
    with Watched() as seen, tiles(tile):
        ntxent(rows, 0.05, queue).backward()
    assert seen.largest == max(tile * tile, rows.numel(), queue.numel())


def test_autocast_in_the_backward_pass_changes_nothing():
    rows = embeddings(9, dtype=torch.float32)
    (plain,) = torch.autograd.grad(ntxent(rows, 0.05), rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (low,) = torch.autograd.grad(ntxent(rows, 0.05), rows)
    assert torch.equal(plain, low)


def test_half_precision_embeddings_are_normalised_and_compared_in_float32():
    """The embeddings are those that autocast computed; the loss is that of the same numbers in float32."""
    half = embeddings(19, dtype=torch.bfloat16)
    queue = embeddings(8, seed=1, dtype=torch.bfloat16).detach()
    exact = half.detach().float().requires_grad_(True)
    value, gradient = value_and_gradient(ntxent, half, 0.05, queue)
    expected, wanted = value_and_gradient(ntxent, exact, 0.05, queue.float())
    assert value.dtype == torch.float32
    assert value == expected
    assert torch.equal(gradient, wanted.bfloat16())


ROWS = 11
LABELS = torch.tensor([3, 3, 1, 0, 2, 1, 1, 0, 2, 3, 5])
# three rows of one document, two of another, and documents of one row; all 64 bits count
OWNERS = torch.tensor([5, 5, 1, 0, 2, 5, 1, -7, 7, 3, 6]) << 60


def queue_of(views):
    queue = torch.randn(7, views.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return queue.to(views.dtype)


def stacked(views):
    return torch.cat([views[:, 0], views[:, 1]])


# A loss in tiles, its plain writing, and the arguments of both, from views.
LOSSES = {
    "ntxent": (ntxent, dense, lambda v: (stacked(v), 0.2, None)),
    "queue": (ntxent, dense, lambda v: (stacked(v), 0.2, queue_of(v))),
    "other documents": (
        partial(ntxent, documents=OWNERS),
        partial(dense, documents=OWNERS),
        lambda v: (stacked(v), 0.2, None),
    ),
    "infonce": (infonce, cross_entropy, lambda v: (v[:, 0], v[:, 1], 0.1, 0.0)),
    "hard negatives": (infonce, cross_entropy, lambda v: (v[:, 0], torch.cat([v[:, 1], v[:, 1].roll(1, 1)]), 0.1, 0.7)),
    "supcon": (supcon, log_softmax, lambda v: (stacked(v), LABELS.repeat(2), 0.3)),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_loss_in_any_tiles_equals_its_plain_writing(name, dtype):
    """Tiles of one row, ragged at the end, cutting at M and beside it, and one for all."""
    loss, plain, arguments = LOSSES[name]
    expected = value_and_gradient(lambda v: plain(*arguments(v)), views_of(torch.float64).requires_grad_())
    views = views_of(dtype).requires_grad_()
    for tile in (1, 3, 5, 7, 10, 11, 12, 20, 21, 22, WHOLE):
        value, gradient = value_and_gradient(lambda v: loss(*arguments(v)), views, tile=tile)
        assert value.dtype == gradient.dtype == dtype
        assert deviation([value], expected[:1]) < LIMITS[dtype], tile
        assert deviation([gradient], expected[1:]) < LIMITS[dtype], tile


def views_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 2, 6, generator=generator, dtype=torch.float64).to(dtype)


def computed(comm, dtype, bounds):
    """Values and gradients of the losses, of the rows of this rank, by name and tile."""
    start, end = bounds[comm.rank]
    found = {}
    for name, (loss, _, arguments) in LOSSES.items():
        for tile in (1, 3, 8, WHOLE):
            own = views_of(dtype)[start:end].requires_grad_()
            table = comm.all_gather(own.flatten(1), start, ROWS).view(ROWS, 2, -1)
            if table.requires_grad:
                table.retain_grad()
            with tiles(tile):
                value = loss(*arguments(table), row_shard=RowShard(comm, start, end, ROWS))
            value.backward()
            # layers between the views and the loss must see this rank's rows alone
            assert not torch.cat([table.grad[:start], table.grad[end:]]).any()
            found[name, tile] = value.item(), own.grad
    return found


def counted(comm):
    """Elements of scores that this rank computes, forward and backward, for shared rows and for all."""
    found, rows = [], COUNTED_ROWS
    start, end = rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size
    for row_shard in (None, RowShard(comm, start, end, rows)):
        table = torch.randn(2 * rows, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with Watched() as seen, tiles(16):
            ntxent(table, 0.1, row_shard=row_shard).backward()
        found.append(seen.products)
    return found


def out_of_memory(comm):
    """What each rank has of two exchanges, before which the last one ran out of memory, and its failures."""

    def compute():
        if comm.rank == comm.size - 1:
            raise torch.OutOfMemoryError("a tile does not fit")
        return torch.ones(1, 2 * comm.size)

    row_shard = RowShard(comm, comm.rank, comm.rank + 1, comm.size)
    exchanges = [row_shard.complete(compute, torch.zeros(2 * comm.size, 3)) for _ in range(2)]
    return torch.cat(exchanges).isnan().tolist(), list(map(str, row_shard.failures))


BOUNDS = {1: [(0, 11)], 2: [(0, 5), (5, 11)], 3: [(0, 4), (4, 4), (4, 11)]}
COUNTED_ROWS = SHARED_ROWS // 8


def on_ranks(comm):
    losses = {dtype: computed(comm, dtype, BOUNDS[comm.size]) for dtype in LIMITS}
    return {"losses": losses, "products": counted(comm), "memory": out_of_memory(comm)}


@cache
def results(size):
    """What each of this many ranks has, which start once for all tests."""
    return run_group(size, on_ranks) if size > 1 else [on_ranks(Communicator())]


@pytest.mark.dist
@pytest.mark.parametrize("size", BOUNDS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_shares_add_up_to_the_whole_loss(size, dtype):
    """A worker may have no rows."""
    ranks = [rank["losses"][dtype] for rank in results(size)]
    for name, (_, plain, arguments) in LOSSES.items():
        views = views_of(torch.float64).requires_grad_()
        expected = plain(*arguments(views))
        expected.backward()
        for tile in (1, 3, 8, WHOLE):
            assert {rank[name, tile][0] for rank in ranks} == {ranks[0][name, tile][0]}, name
            assert ranks[0][name, tile][0] == pytest.approx(expected.item(), rel=LIMITS[dtype]), name
            gradient = torch.cat([rank[name, tile][1] for rank in ranks])
            assert deviation([gradient], [views.grad]) < LIMITS[dtype], (name, tile)


@pytest.mark.dist
def test_a_worker_computes_its_rows_alone():
    """M^2 / W scores in each of both passes; all of them have half of M^2, because scores are symmetric."""
    scores = (2 * COUNTED_ROWS) ** 2
    for whole, row_shard in (rank["products"] for rank in results(3)):
        assert row_shard == pytest.approx(2 * scores / 3, rel=0.02)
        assert whole == pytest.approx(scores, rel=0.1)


PML = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}


@pytest.mark.dist
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
    task = TrainTask(encoder=tiny_encoder(), objective=objective, comm=Communicator(1, 2), seed=0)
    passes = GradCache(task, 1, rows_of(torch.empty(0), SHARED_ROWS // 2), [])
    counts = GlobalCounts(selected=0, first_row=SHARED_ROWS // 2, num_rows=SHARED_ROWS)
    assert (passes._row_shard(counts) is not None) == shared


@pytest.mark.dist
def test_a_worker_without_memory_leaves_no_other_waiting():
    first, second = (rank["memory"] for rank in results(2))
    assert first == ([[False, True, False, True]] * 2, [])
    assert second == (first[0], ["a tile does not fit"])


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("unmasked", [False, True])
def test_declutr_views_are_anchors_and_mean_positives(unmasked):
    """Anchor beside the mean of its own positives; with a second forward it is the unmasked anchor that counts."""
    objective = declutr(DeclutrConfig(contrast_unmasked_anchors=unmasked), num_positives=3)
    masked, plain, positives = randn(4, 5), randn(4, 5, seed=1), randn(12, 5, seed=2)
    spans = torch.cat([masked, *([plain] if unmasked else []), positives])
    views = objective.views(spans, rows_of(spans, 4))
    assert torch.equal(views[:, 0], plain if unmasked else masked)
    for anchor in range(4):
        assert deviation([views[anchor, 1]], [positives[3 * anchor : 3 * anchor + 3].mean(0)]) < 1e-15


def test_queue_holds_the_latest_and_only_as_negatives():
    objective = declutr(DeclutrConfig(queue_size=6, loss={"kind": "ntxent", "temperature": 0.3}), 1, 1, size=5)
    assert objective.remembers
    batches = [randn(2, 2, 5, seed=seed) for seed in range(3)]
    seen = torch.empty(0, 5, dtype=torch.float64)
    for views in batches:
        views.requires_grad_(True)
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


def test_the_state_of_another_objective_is_refused():
    with pytest.raises(RuntimeError, match=r"unexpected classifier\.weight"):
        declutr().restore({"classifier.weight": torch.zeros(2), "queue": torch.zeros(1, 2)})


def test_without_a_queue_nothing_is_kept():
    objective = declutr(DeclutrConfig(), 1, 1)
    assert not objective.remembers
    assert objective.state() == {}


def metric_loss(**given):
    return metric_learning_loss(MetricLearningConfig(kind="pytorch_metric_learning", **given))


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("NTXentLoss", {"temperatur": 0.05}, ("objective.loss NTXentLoss", "miner None", "'temperatur'")),
        ("ArcFaceLoss", {"num_classes": 4, "embedding_size": 5}, ("objective.loss = ArcFaceLoss", "class weights")),
    ],
)
def test_wrong_arguments_and_losses_with_class_weights_are_named(name, arguments, told):
    with pytest.raises(ValueError, match=all_of(told)):
        metric_loss(loss=name, loss_arguments=arguments)


def test_a_miner_chooses_what_counts():
    embeddings = randn(12, 5)
    plain = metric_loss(loss="TripletMarginLoss")(embeddings)
    mined = metric_loss(loss="TripletMarginLoss", miner="BatchHardMiner")(embeddings)
    assert mined > plain
