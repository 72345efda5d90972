"""SimCSE, SCD, SCL and SupCon against recorded losses and gradients of the released code, in float64."""

import numpy as np
import pytest
import torch
from measures import deviation

from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.simcse import Simcse
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import Supcon
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.objectives.texts import Scd, Scl

pytestmark = pytest.mark.golden

LIMIT = 1e-10


def tensor(array):
    return torch.tensor(np.array(array), dtype=torch.float64, requires_grad=True)


def differentiated(objective, views, facts=None):
    """The terms, after a backward through their sum."""
    terms = objective.double().train().loss(Gathered(views, facts or {}))
    sum(terms.values()).backward()
    return {name: value.item() for name, value in terms.items()}


def test_simcse_loss_equals_the_recorded_one(figures):
    """Unsupervised, with the head, with hard negatives, and with a weight on them."""
    arrays = figures.arrays("simcse_cases")
    for case in figures.json("simcse_cases")["text"]:
        name, supervised = case["name"], case["num_sent"] == 3
        weight = case["hard_negative_weight"]
        config = SimcseConfig(
            supervised=supervised, temperature=case["temp"], hard_negative_weight=weight, head=case["mlp"]
        )
        objective = Simcse(config, RunContext(), case["H"])
        if case["mlp"]:
            state = {"head.0.weight": arrays[f"{name}/mlp_W"], "head.0.bias": arrays[f"{name}/mlp_b"]}
            objective.double().load_state_dict({key: torch.tensor(value) for key, value in state.items()})
        views = tensor(arrays[f"{name}/z"])
        terms = differentiated(objective, views)
        assert deviation([terms["contrastive"]], [case["official"]]) < LIMIT, name
        assert deviation([views.grad], [arrays[f"{name}/grad_z"]]) < LIMIT, name


def scd_of(case, arrays):
    name = case["name"]
    config = ScdConfig(
        repulsion_weight=case["task_alpha"],
        decorrelation_weight=case["task_beta"],
        off_diagonal_weight=case["task_lambda"],
        temperature=case["temp"],
        projector=[int(size) for size in case["projector"].split("-")],
    )
    objective = Scd(config, RunContext(), case["D"]).double()
    linear = [layer for layer in objective.projector if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        linear[0].bias.copy_(torch.tensor(arrays[f"{name}/b0"]))
        for number, layer in enumerate(linear):
            layer.weight.copy_(torch.tensor(arrays[f"{name}/W{number}"]))
    return objective, linear


def test_scd_loss_equals_the_recorded_one(figures):
    """Loss, its two parts, and the gradients of views and projector."""
    arrays = figures.arrays("scd_cases")
    for case in figures.json("scd_cases")["cases"]:
        name, code = case["name"], case["oracle"]["code"]
        objective, linear = scd_of(case, arrays)
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
        positives = "all" if case["pos_num"] < 0 else case["pos_num"]
        objective = scl_of(case, arrays, positives=positives)
        views = tensor([arrays[f"{name}/e1"], arrays[f"{name}/e2"]])
        terms = differentiated(objective, views.transpose(0, 1), scl_facts(case, arrays))
        assert deviation([sum(terms.values())], [case["official_total"]]) < LIMIT, name
        if "contrastive" in terms:
            assert terms["contrastive"] == pytest.approx(case["lamb"] * case["scl_mean"], rel=LIMIT)
        if "classification" in terms:
            assert terms["classification"] == pytest.approx((1 - case["lamb"]) * case["ce"], rel=LIMIT)
        wanted = [arrays[f"{name}/grad_e1"], arrays[f"{name}/grad_e2"]]
        assert deviation(list(views.grad), wanted) < LIMIT, name


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


def image_objective(case, **changes):
    return Supcon(SupconConfig(temperature=case["tau"], head=False, **changes), RunContext(), 1)


@pytest.mark.parametrize(
    ("recorded", "gradient", "changes"),
    [
        ("SupConLoss", "grad_SupConLoss", {}),
        ("SupConLoss_simclr", None, {"labels": False}),
        ("new_SupCon_forward", "grad_new_SupCon", {"reference_supcon": True}),
        ("new_SimCLR_forward", "grad_new_SimCLR", {"reference_supcon": True, "labels": False}),
    ],
)
def test_supcon_loss_equals_the_recorded_one(figures, recorded, gradient, changes):
    """Khosla's loss and SimCLR, and the released forms, whose target is the rank of the class."""
    arrays = figures.arrays("simcse_cases")
    for case in figures.json("simcse_cases")["image"]:
        first, second, labels = (arrays[f"image/{case['name']}/{part}"] for part in ("f1", "f2", "labels"))
        views = tensor(np.stack([first, second], axis=1))
        facts = {"label": torch.tensor(labels).long()}
        terms = differentiated(image_objective(case, **changes), views, facts)
        assert deviation([terms["supcon"]], [case[recorded]]) < LIMIT, case["name"]
        if gradient is not None:
            found = torch.cat(views.grad.unbind(1))
            assert deviation([found], [arrays[f"image/{case['name']}/{gradient}"]]) < LIMIT, case["name"]
