"""Remarks about a contrastive task that is too easy to learn from."""

import math

import pytest
from messages import says
from tinyruns import least_config as config

from declutr.trainer.objectives.config import VanishedLoss


def small_batch(run):
    return run.objective.remark_before(run.context("drop"))


def easy_start(run, loss):
    return run.objective.remark_after_first_step(run.context("drop"), {"contrastive": loss, "mlm": 0.0})


def test_batch_smaller_than_the_papers_is_remarked():
    assert small_batch(config()) is None
    remark = small_batch(config(batch_documents=8))
    says(remark, "batch_documents = 8", "7 other documents", "15")
    assert "Increase batch_documents" in remark
    assert small_batch(config(batch_documents=8, objective={"terms": "mlm"})) is None
    assert small_batch(config(batch_documents=8, objective={"queue_size": 64})) is None


@pytest.mark.parametrize(
    ("given", "loss", "remarked"),
    [
        ({}, 0.117, True),
        ({}, math.log(63), False),
        ({}, 0.42, False),
        ({"batch_documents": 1, "spans": {"num_anchors": 1}}, 0.0, True),
        ({"objective": {"terms": "mlm"}}, 0.0, False),
        ({"objective": {"reference_rank_scaling": 4}}, 0.1, False),
    ],
)
def test_first_loss_far_below_guessing_is_remarked(given, loss, remarked):
    remark = easy_start(config(**given), loss)
    assert (remark is not None) == remarked


def test_the_remark_names_what_to_change():
    remark = easy_start(config(), 0.117)
    says(remark, "0.117", "4.14")
    says(remark, "batch_documents (now 16)", "spans.strategy=distant", "spans.num_anchors=1")
    assert "strategy" not in easy_start(config(spans={"strategy": "distant"}), 0.117)


def watched(**objective):
    run = config(objective={"kind": "simcse", **objective})
    return VanishedLoss(run.objective, run.context("drop"))


def test_a_loss_that_stays_near_0_is_remarked_once():
    found = watched()
    assert [found.add({"contrastive": 0.0004}) for _ in range(9)] == [None] * 9
    remark = found.add({"contrastive": 0.0004})
    says(remark, "0.0004", "no negatives")
    says(remark, "batch_documents (now 16)")
    assert [found.add({"contrastive": 0.0}) for _ in range(20)] == [None] * 20


def test_a_loss_that_rises_again_is_not_remarked():
    found = watched()
    assert {found.add({"contrastive": 0.1 if step % 10 == 9 else 0.0}) for step in range(40)} == {None}
    with_mlm = watched(mlm_loss_weight=0.1)
    remarks = [with_mlm.add({"contrastive": 0.0, "mlm": 5.0}) for _ in range(20)]
    assert ["the MLM loss" in (remark or "") for remark in remarks] == [step == 9 for step in range(20)]
    assert config().objective.remark_on_loss(config().context("drop"), {"contrastive": 0.0, "mlm": 0.0}) is None
