"""Gradients over several ranks against the recorded ones of a single process and of the released gather."""

import pytest
import torch
from groups import run_group
from measures import deviation
from tiny import contrastive, declutr, rows_of

from declutr.trainer.objectives.declutr.config import DeclutrConfig

pytestmark = [pytest.mark.golden, pytest.mark.dist]
LIMIT = 1e-10


def rank_gradients(comm, arrays, name, tau, released):
    """Encoder tanh(Wx + b) and the objective's loss on this rank's slice; what a rank ends up with."""
    get = {key: torch.tensor(arrays[f"{name}/in/{key}"]) for key in ("W", "b", "xa", "xp")}
    weight, bias = get["W"].requires_grad_(True), get["b"].requires_grad_(True)
    anchors = torch.tanh(get["xa"][comm.rank] @ weight.T + bias)
    positives = torch.tanh(get["xp"][comm.rank] @ weight.T + bias)
    anchors.retain_grad()
    positives.retain_grad()
    settings = {
        "loss": {"kind": "ntxent", "temperature": tau},
        "reference_rank_scaling": comm.size if released else None,
    }
    objective = declutr(DeclutrConfig(**settings), 1, positives.shape[1])
    rows = len(anchors)
    views = objective.views(torch.cat([anchors, positives.flatten(0, 1)]), rows_of(anchors, rows))
    gathered = comm.all_gather(views.flatten(1), comm.rank * rows, comm.size * rows).view(comm.size * rows, 2, -1)
    value = contrastive(objective, gathered)
    value.backward()
    comm.all_reduce_gradients([weight, bias])
    return value.item(), (weight.grad, bias.grad), anchors.grad, positives.grad


def all_cases(comm, arrays, cases):
    return {
        (case["name"], released): rank_gradients(comm, arrays, case["name"], case["tau"], released)
        for case in cases
        for released in (False, True)
    }


def test_step_of_every_world_size_equals_the_recorded_one(figures):
    arrays = figures.arrays("ntxent_multirank")
    cases = figures.json("ntxent_multirank")["cases"]
    for size in sorted({case["world"] for case in cases}):
        of_size = [case for case in cases if case["world"] == size]
        ranks = run_group(size, all_cases, arrays, of_size)
        for case in of_size:
            name = case["name"]
            single, released = (
                [arrays[f"{name}/{prefix}{key}"] for key in ("gW", "gb")]
                for prefix in ("single/", "official_scale_fix_false/ddp_")
            )
            for rank, results in enumerate(ranks):
                loss, gradients, anchors, positives = results[name, False]
                released_loss, released_gradients, *_ = results[name, True]
                assert deviation([loss, released_loss], [case["single_process_loss_mean"]] * 2) < LIMIT, name
                assert deviation(gradients, single) < LIMIT, name
                assert deviation(released_gradients, released) < LIMIT, name
                assert deviation([anchors], [arrays[f"{name}/single/grad_anchor_emb"][rank]]) < LIMIT, name
                assert deviation([positives], [arrays[f"{name}/single/grad_positive_emb"][rank]]) < LIMIT, name
