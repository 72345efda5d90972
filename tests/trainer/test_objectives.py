"""The contrastive half of the objective: views, queue, losses by name."""

import math

import pytest
import torch
from measures import deviation
from messages import all_of
from pydantic import ValidationError
from tiny import contrastive, declutr, rows_of

from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig
from declutr.trainer.objectives.declutr.ntxent import MetricLearningLoss, ntxent


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(embeddings, temperature, queue=()):
    """Equation (1) of the paper, term by term, as a mean."""
    rows = [row / row.norm() for row in embeddings]
    others = [row / row.norm() for row in queue]
    pairs, terms = len(rows) // 2, []
    for i, row in enumerate(rows):
        scores = [math.exp(row @ other / temperature) for k, other in enumerate(rows) if k != i]
        scores += [math.exp(row @ other / temperature) for other in others]
        positive = math.exp(row @ rows[(i + pairs) % (2 * pairs)] / temperature)
        terms.append(-math.log(positive / sum(scores)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("queued", [0, 3])
def test_declutr_loss_equals_a_plain_writing(queued):
    embeddings, queue = randn(8, 5), randn(queued, 5, seed=1)
    assert deviation([ntxent(embeddings, 0.3, queue)], [by_hand(embeddings, 0.3, queue)]) < 1e-12


@pytest.mark.parametrize("temperature", [5e-4, 0.05, 1.0])
def test_declutr_gradient_is_the_derivative(temperature):
    embeddings = randn(8, 5).requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda rows: ntxent(rows, temperature, randn(3, 5, seed=1)), embeddings, eps=1e-8, atol=1e-4 / temperature
    )


def test_one_pair_alone_has_nothing_to_learn():
    embeddings = randn(2, 5).requires_grad_(True)
    loss = ntxent(embeddings, 0.05)
    loss.backward()
    assert loss.item() == 0.0
    assert (embeddings.grad == 0).all()


def test_one_pair_with_a_queue_has():
    embeddings, queue = randn(2, 5), randn(4, 5, seed=1)
    assert deviation([ntxent(embeddings, 0.3, queue)], [by_hand(embeddings, 0.3, queue)]) < 1e-12


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
        assert deviation([value], [by_hand(embeddings, 0.3, seen)]) < 1e-12
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


@pytest.mark.parametrize("name", ["NtXentLoss", "_private", "__builtins__", "os"])
def test_unknown_loss_lists_the_known(name):
    with pytest.raises(ValidationError, match=all_of(f"'{name}'", "NTXentLoss", "SupConLoss")):
        MetricLearningConfig(kind="pytorch_metric_learning", loss=name)


def test_unknown_miner_lists_the_known():
    with pytest.raises(ValidationError, match=all_of("'Miner'", "MultiSimilarityMiner")):
        MetricLearningConfig(kind="pytorch_metric_learning", loss="NTXentLoss", miner="Miner")


def test_unknown_kind_lists_the_known():
    with pytest.raises(ValidationError, match="'ntxent', 'pytorch_metric_learning'"):
        DeclutrConfig(loss={"kind": "triplet"})


def metric_loss(**given):
    config = MetricLearningConfig(kind="pytorch_metric_learning", **given)
    return MetricLearningLoss(**config.model_dump(exclude={"kind"}))


def test_wrong_argument_is_named():
    with pytest.raises(ValueError, match=all_of("objective.loss NTXentLoss", "miner None", "'temperatur'")):
        metric_loss(loss="NTXentLoss", loss_arguments={"temperatur": 0.05})


def test_losses_with_class_weights_are_refused():
    with pytest.raises(ValueError, match=all_of("objective.loss = ArcFaceLoss", "class weights")):
        metric_loss(loss="ArcFaceLoss", loss_arguments={"num_classes": 4, "embedding_size": 5})


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
