"""Remarks about a contrastive task that is too easy to learn from."""

import math

import pytest
from messages import says
from tinyruns import least_config as config


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
