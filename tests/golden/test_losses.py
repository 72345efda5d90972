"""NT-Xent (also of several ranks), SimCSE, SCD, SCL and SupCon against recorded losses and gradients."""

import numpy as np
import pytest
import torch
from groups import run_group
from measures import deviation
from tiny import contrastive, declutr, rows_of

from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import ntxent
from declutr.trainer.objectives.simcse import Simcse
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.objectives.texts import Scd, Scl

pytestmark = pytest.mark.golden


def loss_and_gradients(case, arrays, dtype, loss=None, autocast=False):
    """Through the objective: the mean of an anchor's P positives is the objective's own."""
    name, a, p, n = case["name"], case["A"], case["P"], case["N"]
    anchors, positives = (
        torch.tensor(arrays[f"{name}/{part}"], dtype=dtype, requires_grad=True) for part in ("anchors", "positives")
    )
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
    config = DeclutrConfig(
        loss={"kind": "ntxent", "temperature": tau}, reference_rank_scaling=comm.size if released else None
    )
    objective, rows = declutr(config, 1, positives.shape[1]), len(anchors)
    views = objective.views(torch.cat([anchors, positives.flatten(0, 1)]), rows_of(anchors, rows))
    gathered = comm.all_gather(views.flatten(1), comm.rank * rows, comm.size * rows).view(comm.size * rows, 2, -1)
    value = contrastive(objective, gathered)
    value.backward()
    comm.all_reduce_gradients([weight, bias])
    return value.item(), (weight.grad, bias.grad), anchors.grad, positives.grad


def all_cases(comm, arrays, cases):
    kinds = [(case["name"], case["tau"], released) for case in cases for released in (False, True)]
    return {(name, released): rank_gradients(comm, arrays, name, tau, released) for name, tau, released in kinds}


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


LIMIT = 1e-10


def tensor(array):
    return torch.tensor(np.array(array), dtype=torch.float64, requires_grad=True)


def differentiated(objective, views, facts=None):
    terms = objective.double().train().loss(Gathered(views, facts or {}))
    sum(terms.values()).backward()
    return {name: value.item() for name, value in terms.items()}


def test_simcse_loss_equals_the_recorded_one(figures):
    arrays = figures.arrays("simcse_cases")
    for case in figures.json("simcse_cases")["text"]:
        name, supervised = case["name"], case["num_sent"] == 3
        settings = {"hard_negative_weight": case["hard_negative_weight"], "head": case["mlp"]}
        config = SimcseConfig(supervised=supervised, temperature=case["temp"], **settings)
        objective = Simcse(config, RunContext(), case["H"])
        if case["mlp"]:
            state = {"head.0.weight": arrays[f"{name}/mlp_W"], "head.0.bias": arrays[f"{name}/mlp_b"]}
            objective.double().load_state_dict({key: torch.tensor(value) for key, value in state.items()})
        views = tensor(arrays[f"{name}/z"])
        assert deviation([differentiated(objective, views)["contrastive"]], [case["official"]]) < LIMIT, name
        assert deviation([views.grad], [arrays[f"{name}/grad_z"]]) < LIMIT, name


def test_scd_loss_equals_the_recorded_one(figures):
    arrays = figures.arrays("scd_cases")
    for case in figures.json("scd_cases")["cases"]:
        name, code = case["name"], case["oracle"]["code"]
        weights = {"repulsion_weight": case["task_alpha"], "decorrelation_weight": case["task_beta"]}
        weights |= {"off_diagonal_weight": case["task_lambda"], "temperature": case["temp"]}
        config = ScdConfig(projector=[int(size) for size in case["projector"].split("-")], **weights)
        objective = Scd(config, RunContext(), case["D"]).double()
        linear = [layer for layer in objective.projector if isinstance(layer, torch.nn.Linear)]
        with torch.no_grad():
            linear[0].bias.copy_(torch.tensor(arrays[f"{name}/b0"]))
            for number, layer in enumerate(linear):
                layer.weight.copy_(torch.tensor(arrays[f"{name}/W{number}"]))
        views = tensor(arrays[f"{name}/z"])
        terms = differentiated(objective, views)
        assert deviation([sum(terms.values())], [case["official_loss"]]) < LIMIT, name
        assert terms["repulsion"] == pytest.approx(case["task_alpha"] * code["L_S_over_temp"], rel=LIMIT)
        assert terms["decorrelation"] == pytest.approx(case["task_beta"] * code["decorrelation"], rel=1e-9, abs=1e-12)
        assert deviation([views.grad], [arrays[f"{name}/grad_z"]]) < LIMIT, name
        gradients = [layer.weight.grad for layer in linear]
        assert deviation(gradients, [arrays[f"{name}/grad_W{number}"] for number in range(3)]) < LIMIT, name


def scl_of(case, arrays, **settings):
    name, config = case["name"], {"positives": "all", "negatives": "all"}
    config |= {"contrastive_weight": case["lamb"], "temperature": case["tau"], **settings}
    objective = Scl(SclConfig(**config), RunContext(), case["H"]).double()
    state = {"0.weight": "W1", "0.bias": "b1", "1.weight": "W2", "1.bias": "b2"}
    objective.classifier.load_state_dict({key: torch.tensor(arrays[f"{name}/{own}"]) for key, own in state.items()})
    return objective


def scl_facts(case, arrays):
    keys = torch.arange(case["B"])
    labels, premises = (torch.tensor(arrays[f"{case['name']}/{key}"]) for key in ("labels", "premise"))
    return {"label": labels, "premise": premises, "hypothesis": keys}


def test_scl_loss_equals_the_recorded_one(figures):
    """Loss and gradients; the released code ignores its number of negatives, which is `negatives: all` here."""
    arrays = figures.arrays("scl_cases")
    for case in figures.json("scl_cases")["cases"]:
        name = case["name"]
        objective = scl_of(case, arrays, positives="all" if case["pos_num"] < 0 else case["pos_num"])
        views = tensor([arrays[f"{name}/e1"], arrays[f"{name}/e2"]])
        terms = differentiated(objective, views.transpose(0, 1), scl_facts(case, arrays))
        assert deviation([sum(terms.values())], [case["official_total"]]) < LIMIT, name
        if "contrastive" in terms:
            assert terms["contrastive"] == pytest.approx(case["lamb"] * case["scl_mean"], rel=LIMIT)
        if "classification" in terms:
            assert terms["classification"] == pytest.approx((1 - case["lamb"]) * case["ce"], rel=LIMIT)
        assert deviation(list(views.grad), [arrays[f"{name}/grad_e{side}"] for side in (1, 2)]) < LIMIT, name


def test_scl_without_an_anchor_is_cross_entropy(figures):
    """Where the released code divides by zero, the contrast is 0, and its gradient too."""
    assert "ZeroDivisionError" in figures.json("scl_cases")["quirks"]["no_entailment_error"]
    arrays = figures.arrays("scl_cases")
    case = figures.json("scl_cases")["cases"][0]
    facts = scl_facts(case, arrays)
    facts["label"] = facts["label"].clamp_min(1)
    views = tensor([arrays[f"{case['name']}/e1"], arrays[f"{case['name']}/e2"]])
    with_contrast = differentiated(scl_of(case, arrays), views.transpose(0, 1), facts)
    assert with_contrast["contrastive"] == 0
    gradient, views.grad = views.grad.clone(), None
    alone = differentiated(scl_of(case, arrays, contrastive_weight=0.0), views.transpose(0, 1), facts)
    assert with_contrast["classification"] == pytest.approx((1 - case["lamb"]) * alone["classification"], rel=1e-14)
    torch.testing.assert_close(gradient, (1 - case["lamb"]) * views.grad)


@pytest.mark.parametrize(("recorded", "gradient", "changes"), [
    ("SupConLoss", "grad_SupConLoss", {}), ("SupConLoss_simclr", None, {"labels": False}),
    ("new_SupCon_forward", "grad_new_SupCon", {"reference_supcon": True}),
    ("new_SimCLR_forward", "grad_new_SimCLR", {"reference_supcon": True, "labels": False}),
])  # fmt: skip
def test_supcon_loss_equals_the_recorded_one(figures, recorded, gradient, changes):
    """Khosla's loss and SimCLR, and the released forms, whose target is the rank of the class."""
    arrays = figures.arrays("simcse_cases")
    for case in figures.json("simcse_cases")["image"]:
        first, second, labels = (arrays[f"image/{case['name']}/{part}"] for part in ("f1", "f2", "labels"))
        views = tensor(np.stack([first, second], axis=1))
        objective = Supcon(SupconConfig(temperature=case["tau"], head=False, **changes), RunContext(), 1)
        terms = differentiated(objective, views, {"label": torch.tensor(labels).long()})
        assert deviation([terms["supcon"]], [case[recorded]]) < LIMIT, case["name"]
        if gradient is not None:
            assert deviation([torch.cat(views.grad.unbind(1))], [arrays[f"image/{case['name']}/{gradient}"]]) < LIMIT, (
                case["name"]
            )
