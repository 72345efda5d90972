"""NT-Xent against recorded values and gradients: of pytorch-metric-learning, the exact formula, and several ranks."""

import pytest
import torch
from groups import run_group
from measures import deviation
from tiny import contrastive, declutr, rows_of

from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import ntxent

pytestmark = pytest.mark.golden


def loss_and_gradients(case, arrays, dtype, loss=None, autocast=False):
    """Through the objective: the mean of an anchor's P positives is the objective's own."""
    name, a, p, n = case["name"], case["A"], case["P"], case["N"]
    anchors = torch.tensor(arrays[f"{name}/anchors"], dtype=dtype, requires_grad=True)
    positives = torch.tensor(arrays[f"{name}/positives"], dtype=dtype, requires_grad=True)
    objective = declutr(DeclutrConfig(loss=loss or {"kind": "ntxent", "temperature": case["tau"]}), a, p)
    spans = torch.cat([anchors, positives.flatten(0, 1)])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = contrastive(objective, objective.views(spans, rows_of(spans, n * a)))
    value.backward()
    return value, (anchors.grad, positives.grad)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("released", [False, True], ids=["ours", "pytorch-metric-learning"])
def test_ntxent_value_and_gradients_equal_the_recorded_ones(figures, dtype, limit, released):
    """Value relative to the recorded value; gradients relative to the largest recorded gradient entry of the case.

    At temperature t a rounding of an input by eps moves a logit by eps / t: given rounded inputs, no algorithm can
    promise a gradient to 1e-5 in float32 below t = 0.005 (two rows may nearly tie); there its limit grows with 1 / t.
    The released loss by its name gives the released numbers, its caps at low temperature included.
    """
    arrays = figures.arrays("ntxent_cases")
    kind = {torch.float64: "pml_f64", torch.float32: "pml_f32"}[dtype] if released else "mean"
    loss = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}
    for case in figures.json("ntxent_cases")["cases"]:
        by_name = loss | {"loss_arguments": {"temperature": case["tau"]}} if released else None
        value, gradients = loss_and_gradients(case, arrays, dtype, by_name)
        allowed = limit if released or dtype == torch.float64 else limit * max(1.0, 0.005 / case["tau"])
        prefix = f"{case['name']}/{kind}_grad" if released else f"{case['name']}/grad"
        names = [f"{prefix}_{part}" for part in ("anchors", "positives")]
        off = deviation([value], [case[kind]]), deviation(gradients, [arrays[name] for name in names])
        assert off[0] < limit, (case["name"], off)
        assert off[1] < allowed, (case["name"], off)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_zero_embedding_stays_finite(figures, dtype):
    """A zero vector has no direction: its gradient is huge (about 1e12, recorded) but a number."""
    recorded = figures.json("ntxent_cases")["zero_embedding"]
    embeddings = torch.randn(16, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    embeddings[3] = 0
    embeddings.requires_grad_(True)
    value = ntxent(embeddings, 0.05)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(embeddings.grad).all()
    assert embeddings.grad.abs().max() < 1e3 * recorded["max_abs_grad"]


def test_autocast_does_not_reach_the_loss(figures):
    """float32 embeddings under bfloat16 autocast: the same bits as without, none of the recorded errors."""
    arrays = figures.arrays("ntxent_cases")
    cases = {case["name"]: case for case in figures.json("ntxent_cases")["cases"]}
    for low in figures.json("ntxent_lowprec"):
        case = cases[low["name"]]
        plain, gradients = loss_and_gradients(case, arrays, torch.float32)
        value, low_gradients = loss_and_gradients(case, arrays, torch.float32, autocast=True)
        assert value.dtype == torch.float32
        assert torch.equal(value, plain)
        assert all(torch.equal(a, b) for a, b in zip(gradients, low_gradients, strict=True))
        names = [f"{case['name']}/grad_{part}" for part in ("anchors", "positives")]
        assert deviation([value], [low["exact"]]) < 1e-5
        assert deviation(low_gradients, [arrays[n] for n in names]) < low["cpu_autocast_bf16"]["rel_grad_err"] / 100


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


@pytest.mark.dist
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
                assert deviation([loss, released_loss], [case["single_process_loss_mean"]] * 2) < 1e-10, name
                assert deviation(gradients, single) < 1e-10, name
                assert deviation(released_gradients, released) < 1e-10, name
                assert deviation([anchors], [arrays[f"{name}/single/grad_anchor_emb"][rank]]) < 1e-10, name
                assert deviation([positives], [arrays[f"{name}/single/grad_positive_emb"][rank]]) < 1e-10, name
