"""Contrasts in tiles: NT-Xent and SupCon against the whole matrix, queue, views; the same shared among workers."""

import pytest
import torch
import torch.nn.functional as F
from groups import run_group
from measures import deviation
from messages import all_of
from pydantic import ValidationError
from tiny import contrastive, declutr, rows_of, tiny_encoder
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from declutr.trainer.objectives.base import SHARED_ROWS, Gathered, RowShard, tile_rows
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig
from declutr.trainer.objectives.declutr.objective import Declutr, MetricLearningLoss, ntxent
from declutr.trainer.objectives.simcse import Simcse, infonce
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon, supcon
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.gradcache import GlobalCounts, GradCache
from declutr.trainer.step.task import TrainTask

TILE_ROWS = tile_rows(torch.device("cpu"))
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def dense(embeddings, temperature, queue=None):
    """The formula, with every score in one matrix."""
    rows = F.normalize(embeddings, dim=-1)
    others = rows if queue is None else torch.cat([rows, F.normalize(queue, dim=-1)])
    scores = rows @ others.T / temperature
    partner = torch.arange(len(rows)).roll(len(rows) // 2)[:, None]
    positive = scores.gather(1, partner)[:, 0]
    left_out = torch.zeros_like(scores, dtype=torch.bool).scatter(1, partner, True).fill_diagonal_(True)
    negatives = scores.masked_fill(left_out, torch.finfo(scores.dtype).min).logsumexp(dim=1)
    return -F.logsigmoid(positive - negatives).mean()


def embeddings(pairs, size=12, dtype=torch.float64, seed=0):
    """Pairs that resemble each other, so that terms are neither all won nor all lost."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    noise = torch.randn(pairs, size, generator=generator, dtype=torch.float64)
    return torch.cat([anchors, anchors + 1.5 * noise]).to(dtype).requires_grad_(True)


def value_and_gradient(loss, rows, *arguments):
    value = loss(rows, *arguments)
    (gradient,) = torch.autograd.grad(value, rows)
    return value, gradient


@pytest.mark.parametrize("temperature", [0.5, 0.05, 5e-4])
@pytest.mark.parametrize("queued", [0, 1, 23])
@pytest.mark.parametrize("dtype", LIMITS)
def test_any_tile_gives_the_dense_value_and_gradient(dtype, queued, temperature):
    """Tiles of 38 rows: of one row, ragged at the end, cutting at M and beside it, and one for all."""
    rows = embeddings(19, dtype=dtype)
    queue = embeddings(queued, seed=1, dtype=dtype).detach()[:queued]
    exact = embeddings(19, dtype=dtype).detach().double().requires_grad_(True)
    expected = value_and_gradient(dense, exact, temperature, queue.double())
    # A rounding by eps of a cosine moves a logit by eps / t: float32 cannot promise 1e-5 of a gradient at 5e-4.
    allowed = LIMITS[dtype] * (1.0 if dtype == torch.float64 else max(1.0, 0.005 / temperature))
    for tile in (1, 3, 7, 16, 18, 19, 20, 37, 38, 39, TILE_ROWS):
        value, gradient = value_and_gradient(ntxent, rows, temperature, queue, tile)
        assert value.dtype == gradient.dtype == dtype
        assert deviation([value], [expected[0]]) < LIMITS[dtype]
        assert deviation([gradient], [expected[1]]) < allowed


def without_own_document(rows, temperature, queue, documents, queue_documents):
    """The loss of each row by a loop over the scores that are in its denominator."""
    rows, queue = F.normalize(rows, dim=-1), F.normalize(queue, dim=-1)
    pairs, terms = len(rows) // 2, []
    for i, row in enumerate(rows):
        partner = (i + pairs) % (2 * pairs)
        kept = [rows[k] for k in range(2 * pairs) if documents[k % pairs] != documents[i % pairs]]
        kept += [each for each, owner in zip(queue, queue_documents, strict=True) if owner != documents[i % pairs]]
        scores = torch.stack([row @ each for each in [rows[partner], *kept]]) / temperature
        terms.append(scores.logsumexp(0) - scores[0])
    return torch.stack(terms).mean()


@pytest.mark.parametrize("tile", [1, 3, 7, 19, 20, TILE_ROWS])
def test_ntxent_excluding_same_document_equals_a_plain_writing(tile):
    """Documents of one to four anchors, of which some are in the queue too; keys use all 64 bits."""
    rows, queue = embeddings(19), embeddings(12, seed=1).detach()[:23]
    documents = torch.randint(-4, 5, (19,), generator=torch.Generator().manual_seed(0)) << 60
    queue_documents = torch.randint(-8, 9, (23,), generator=torch.Generator().manual_seed(1)) << 60
    assert len(documents.unique()) < 10
    expected = value_and_gradient(without_own_document, rows, 0.2, queue, documents, queue_documents)
    found = value_and_gradient(
        lambda given: ntxent(given, 0.2, queue, tile, documents=documents, queue_documents=queue_documents), rows
    )
    assert deviation(found, expected) < 1e-10
    alone = value_and_gradient(lambda given: ntxent(given, 0.2, None, tile, documents=torch.zeros(19)), rows)
    assert alone[0] == 0  # one document alone: nothing is left to tell apart
    assert not alone[1].any()


def test_ntxent_of_several_default_tiles_equals_the_dense_one():
    rows = embeddings(TILE_ROWS // 2 + 100)
    for found, expected in zip(
        value_and_gradient(ntxent, rows, 0.05), value_and_gradient(dense, rows, 0.05), strict=True
    ):
        assert deviation([found], [expected]) < 1e-10


@pytest.mark.parametrize("tile", [1, TILE_ROWS])
def test_ntxent_of_one_pair_without_a_queue_is_zero(tile):
    """Without a negative there is nothing to learn; with a queue its embeddings are the negatives."""
    rows = embeddings(1)
    value, gradient = value_and_gradient(ntxent, rows, 0.05, None, tile)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(rows))
    queue = embeddings(3, seed=1).detach()
    expected = value_and_gradient(dense, rows, 0.05, queue)
    assert deviation(value_and_gradient(ntxent, rows, 0.05, queue, tile), expected) < 1e-10


def test_lost_and_won_terms_keep_their_digits():
    """At 5e-4 a lost term is in the thousands, a won one underflows: both exact, no gradient is NaN."""
    anchors = torch.eye(6, 8, dtype=torch.float64)
    for positives in (anchors, -anchors, anchors.roll(1, 0)):
        rows = torch.cat([anchors, positives]).float().requires_grad_(True)
        exact = rows.detach().double().requires_grad_(True)
        value, gradient = value_and_gradient(ntxent, rows, 5e-4, None, 5)
        expected = value_and_gradient(dense, exact, 5e-4)
        assert torch.allclose(value.double(), expected[0], rtol=1e-5)
        assert torch.isfinite(gradient).all()
        assert torch.allclose(gradient.double(), expected[1], rtol=1e-5, atol=1e-3)


def test_queue_has_no_gradient():
    queue = embeddings(3, seed=1)
    ntxent(embeddings(4), 0.05, queue).backward()
    assert queue.grad is None


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, backward included."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor)]  # fmt: skip
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("queued", [0, 300])
def test_no_matrix_beyond_a_tile(queued):
    pairs, tile = 200, 32
    rows, queue = embeddings(pairs, size=4), embeddings(queued, size=4, seed=1).detach()[:queued]
    with Largest() as seen:
        ntxent(rows, 0.05, queue, tile).backward()
    assert seen.elements == max(tile * tile, rows.numel(), queue.numel())
    with Largest() as whole:
        dense(rows, 0.05, queue).backward()
    assert whole.elements >= (2 * pairs) ** 2  # the measure sees what is there


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


def rows(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 7, generator=generator, dtype=torch.float64).requires_grad_()


def test_distinct_labels_are_ntxent():
    embeddings = rows(24)
    labels = torch.arange(12).repeat(2)
    found, expected = value_and_gradient(supcon, embeddings, labels, 0.3), value_and_gradient(ntxent, embeddings, 0.3)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-12)
    assert deviation([found[1]], [expected[1]]) < 1e-12


@pytest.mark.parametrize("tile", [1, 3, 5, 20, 64])
def test_supcon_tiles_change_nothing(tile):
    embeddings, labels = rows(22), torch.tensor([3, 3, 1, 0, 2, 1, 1, 0, 2, 3, 5]).repeat(2)
    scores = F.normalize(embeddings, dim=-1)
    scores = (scores @ scores.T / 0.2).masked_fill(torch.eye(22, dtype=torch.bool), float("-inf"))
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    plain = -(scores.log_softmax(dim=1).where(same, 0).sum(dim=1) / same.sum(dim=1)).mean()
    found = value_and_gradient(supcon, embeddings, labels, 0.2, tile)
    assert found[0].item() == pytest.approx(plain.item(), rel=1e-12)
    assert deviation([found[1]], torch.autograd.grad(plain, embeddings)) < 1e-12


def test_reference_supcon_survives_a_round_of_its_settings():
    config = SupconConfig(reference_supcon=True)
    assert SupconConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValueError, match="base_temperature"):
        SupconConfig(reference_supcon=True, base_temperature=0.5)


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
        assert deviation([value], [dense(embeddings, 0.3, seen)]) < 1e-12
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


def test_queue_restored_without_its_documents_is_dropped_only_if_they_are_needed():
    """A queue whose documents are unknown could hold spans of an anchor's own document."""
    config = DeclutrConfig(queue_size=6, loss={"temperature": 0.3, "exclude_same_document": True})
    objective, plain = declutr(config, 1, 1, size=5), declutr(DeclutrConfig(queue_size=6), 1, 1, size=5)
    for step in range(3):
        batch = Gathered(randn(2, 2, 5, seed=step), {"document": torch.tensor([step, -step])})
        objective.remember(batch)
        plain.remember(Gathered(batch.views))
    assert objective.queue_documents.tolist() == [1, -1, 2, -2, 2, -2]
    twin = declutr(config, 1, 1, size=5)
    twin.restore(objective.state())
    assert torch.equal(twin.queue_documents, objective.queue_documents)
    twin.restore(plain.state())
    assert twin.state() == {}
    plain.restore(objective.state())
    assert list(plain.state()) == ["queue"]


def test_the_state_of_another_objective_is_refused():
    with pytest.raises(RuntimeError, match=r"unexpected classifier\.weight"):
        declutr().restore({"classifier.weight": torch.zeros(2), "queue": torch.zeros(1, 2)})


def test_without_a_queue_nothing_is_kept():
    objective = declutr(DeclutrConfig(), 1, 1)
    assert not objective.remembers
    assert objective.state() == {}


def test_queue_with_another_loss_is_refused():
    with pytest.raises(ValidationError, match=all_of("queue_size = 8", "ntxent", "pytorch_metric_learning")):
        DeclutrConfig(queue_size=8, loss={"kind": "pytorch_metric_learning", "loss": "NTXentLoss"})


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        *(({"loss": name}, (f"'{name}'", "NTXentLoss", "SupConLoss")) for name in ("NtXentLoss", "_private", "os")),
        ({"loss": "__builtins__"}, ("'__builtins__'", "NTXentLoss", "SupConLoss")),
        ({"miner": "Miner"}, ("'Miner'", "MultiSimilarityMiner")),
        ({"kind": "triplet"}, "'ntxent', 'pytorch_metric_learning'"),
    ],
)
def test_unknown_loss_miner_or_kind_lists_the_known(changes, known):
    with pytest.raises(ValidationError, match=all_of(known)):
        DeclutrConfig(loss={"kind": "pytorch_metric_learning", "loss": "NTXentLoss"} | changes)


def metric_loss(**given):
    config = MetricLearningConfig(kind="pytorch_metric_learning", **given)
    return MetricLearningLoss(**config.model_dump(exclude={"kind"}))


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


def test_labels_pair_row_i_with_row_i_plus_m():
    """Perfect pairs far from each other: no loss; shifted by one: a loss."""
    corners = torch.eye(5, dtype=torch.float64)
    loss = metric_loss(loss="NTXentLoss", loss_arguments={"temperature": 0.05})
    assert loss(torch.cat([corners, corners])) < 1e-6
    assert loss(torch.cat([corners, corners.roll(1, 0)])) > 10


ROWS = 11


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


@pytest.mark.dist
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


@pytest.mark.dist
def test_a_worker_computes_its_rows_alone():
    """M^2 / W scores in each of both passes; all of them have half of M^2, because scores are symmetric."""
    rows = SHARED_ROWS // 8
    for whole, row_shard in run_group(3, counted, rows):
        assert row_shard == pytest.approx(2 * (2 * rows) ** 2 / 3, rel=0.02)
        assert whole == pytest.approx((2 * rows) ** 2, rel=0.1)


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


@pytest.mark.dist
def test_a_worker_without_memory_leaves_no_other_waiting():
    first, second = run_group(2, out_of_memory)
    assert second == "raised"
    assert [value == value for value in first[0]] == [True, False, True, False]
