"""DeCLUTR's objective: its views, its queue, and losses of pytorch-metric-learning by name."""

import pytest
import torch
from measures import deviation
from messages import all_of
from tiny import contrastive, declutr, rows_of

from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig
from declutr.trainer.objectives.declutr.objective import metric_learning_loss, ntxent


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


def test_labels_pair_row_i_with_row_i_plus_m():
    """Perfect pairs far from each other: no loss; shifted by one: a loss."""
    corners = torch.eye(5, dtype=torch.float64)
    loss = metric_loss(loss="NTXentLoss", loss_arguments={"temperature": 0.05})
    assert loss(torch.cat([corners, corners])) < 1e-6
    assert loss(torch.cat([corners, corners.roll(1, 0)])) > 10
