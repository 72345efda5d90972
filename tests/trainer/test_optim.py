"""The optimizer: AdamW without bias correction, learning rates, clipping, and parameters without decay."""

import pytest
import torch
from measures import deviation
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from transformers import get_scheduler

from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.optim import UncorrectedAdamW, learning_rate, parameter_groups


def test_fused_update_without_bias_correction_equals_the_plain_one():
    """The kernel's arithmetic and the equation's, which differ in rounding alone."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    gradients = [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(4)]
    found = []
    for fused in (False, True):
        held = [torch.nn.Parameter(w.clone()) for w in weights]
        optimizer = UncorrectedAdamW(held, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, fused=fused)
        for step in gradients:
            for parameter, gradient in zip(held, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        found.append([parameter.detach() for parameter in held])
    assert deviation(found[0], weights) > 0
    assert deviation(*found) < 1e-6


NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("steps", [1, 7, 50])
@pytest.mark.parametrize("schedule", NAMES)
def test_rates_are_those_of_transformers(schedule, steps, warmup):
    """The rate of each update, of which the first is that of the scheduler before its first step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    config = OptimConfig(lr=3e-5, schedule=schedule, warmup_ratio=warmup)
    warmup_steps = -(-steps * round(100 * warmup) // 100)  # rounded up, as TrainingArguments does
    scheduler = get_scheduler(NAMES[schedule], optimizer, warmup_steps, steps)
    for step in range(1, steps + 1):
        assert learning_rate(config, step, steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        scheduler.step()


def test_without_a_limit_gradients_are_not_scaled():
    """The norm is reported, and the update is that of an unreachable limit."""
    found = []
    for limit in (None, 1e9, 1e-3):
        optim = OptimConfig(lr=1e-2, max_grad_norm=limit)
        train_step = tiny_train_step(tiny_encoder(), optim=optim)
        metrics = train_step.step({"": rank_batch(tiny_collator(), documents([48, 70, 49], 12))}, 1)
        found.append((metrics.grad_norm, torch.cat([p.flatten() for p in train_step.encoder.parameters()])))
    assert found[0][0] == found[1][0] == found[2][0] > 1e-3
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])


def test_weights_of_normalisation_layers_of_any_kind_do_not_decay():
    norms = torch.nn.RMSNorm(3), torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3), torch.nn.GroupNorm(1, 3)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), *norms)
    decay, no_decay = parameter_groups(module, 0.1)
    assert [id(p) for p in decay["params"]] == [id(module[0].weight)]
    assert len(no_decay["params"]) == 8
    module[0].weight.requires_grad_(False)
    assert parameter_groups(module, 0.1)[0]["params"] == []
