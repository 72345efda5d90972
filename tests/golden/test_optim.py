"""Learning rates, AdamW trajectories and parameter groups against the recorded ones."""

import pytest
import torch
from measures import deviation
from tiny import tiny_encoder
from torch import nn

from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.optim import build_optimizer, learning_rate, parameter_groups

pytestmark = pytest.mark.golden


def test_learning_rates_equal_the_recorded_ones(figures):
    """Every recorded curve of a run that knew its number of steps."""
    cases = [case for case in figures.json("optim")["lr"] if case["name"].startswith("known_steps")]
    assert cases
    for case in cases:
        total = case["epochs"] * case["steps_per_epoch"]
        ours = [learning_rate(OptimConfig(), step, total) for step in range(1, total + 1)]
        off = deviation(ours, case["official"])
        assert off < 1e-10, case["name"]


@pytest.mark.parametrize("bias_correction", [False, True])
def test_optimizer_trajectories_equal_the_recorded_ones(figures, bias_correction):
    """Without bias correction transformers 3.4's updates (where recorded so), with it torch's."""
    arrays = figures.arrays("optim")
    for case in figures.json("optim")["adamw"]:
        released_corrects = case["name"] == "bias_corrected"
        if released_corrects and not bias_correction:
            continue
        get = {key: torch.tensor(arrays[f"adamw/{case['name']}/{key}"]) for key in ("p0", "grads", "lrs")}
        module = nn.Module()
        decays = case["name"] != "no_decay_group"
        parameter = nn.Parameter(get["p0"])
        setattr(module, "weight" if decays else "bias", parameter)
        optimizer = build_optimizer(OptimConfig(bias_correction=bias_correction), module, torch.nn.Module())
        trajectory = []
        for gradient, lr in zip(get["grads"], get["lrs"].tolist(), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
            parameter.grad = gradient
            optimizer.step()
            trajectory.append(parameter.detach().clone())
        expected = arrays[f"adamw/{case['name']}/{'torch_adamw_traj' if bias_correction else 'traj'}"]
        off = deviation([torch.stack(trajectory)], [expected])
        assert off < 1e-10, case["name"]


def test_parameter_groups_equal_the_recorded_ones(figures):
    """The released regular expressions put the same names on the same sides, tied weights once."""
    for family, recorded in figures.json("optim")["param_groups"].items():
        encoder = tiny_encoder(family, from_config={"num_hidden_layers": 1})
        names = {id(parameter): name for name, parameter in encoder.model.named_parameters()}
        decay, no_decay = parameter_groups(encoder, 0.1)
        assert sorted(names[id(p)] for p in decay["params"]) == sorted(recorded["decay"])
        assert sorted(names[id(p)] for p in no_decay["params"]) == sorted(recorded["no_decay"])
        assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
