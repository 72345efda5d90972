"""Learning rates against transformers' schedulers; runs without clipping; settings that have no effect."""

import pytest
import torch
from pydantic import ValidationError
from tiny import documents, rank_batch, tiny_encoder, tiny_feed, tiny_stepper
from transformers import get_scheduler

from trainer.setup.config import TrainConfig
from trainer.step.optim import learning_rate
from trainer.step.settings import OptimConfig

NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("steps", [1, 7, 50])
@pytest.mark.parametrize("schedule", NAMES)
def test_rates_are_those_of_transformers(schedule, steps, warmup):
    """The rate of each update, of which the first is that of the scheduler before its first step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    config = OptimConfig(lr=3e-5, schedule=schedule, warmup_fraction=warmup)
    warmup_steps = -(-steps * round(100 * warmup) // 100)  # rounded up, as TrainingArguments does
    scheduler = get_scheduler(NAMES[schedule], optimizer, warmup_steps, steps)
    for step in range(1, steps + 1):
        assert learning_rate(config, step, steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-20)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_fraction": 0.1}, "has no effect with schedule = slanted_triangular"),
        ({"schedule": "linear", "cut_fraction": 0.2}, "have no effect with schedule = linear"),
        ({"schedule": "cosine", "ratio": 8}, "have no effect with schedule = cosine"),
        ({"schedule": "triangular"}, "slanted_triangular"),
        ({"max_grad_norm": 0}, "greater than 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        OptimConfig(**settings)


def test_runs_of_before_keep_their_hash_and_new_settings_change_it():
    """The settings that older versions did not have are left out at their old values."""
    config = {"run": "r", "data": "d", "encoder": {"pretrained": "x"}}
    plain = TrainConfig.model_validate(config).decisive()
    assert {"schedule", "warmup_fraction"}.isdisjoint(plain["optim"])
    assert {"data", "stsb"}.isdisjoint(plain["validation"])
    for changed in (
        {"optim": {"schedule": "linear"}},
        {"optim": {"schedule": "constant", "warmup_fraction": 0.1}},
        {"optim": {"max_grad_norm": None}},
        {"validation": {"stsb": "sts"}},
        {"validation": {"data": "other"}},
        {"objective": {"released_rank_scaling": 4}},
    ):
        assert TrainConfig.model_validate(config | changed).decisive() != plain


BEFORE = {"run": "r", "data": "d", "encoder": {"pretrained": "x"}, "validation": {"every_steps": 1000}}
OF_BEFORE = {
    "declutr": ({"released_rank_scaling": False}, "16fdb48a3f6d9811"),
    "simcse": ({"mlm_loss_weight": 0.1}, "6fde9b864c70047b"),
    "scd": ({}, "94db0e705ad9b18c"),
    "scl": ({}, "60740be6aef51948"),
}


@pytest.mark.parametrize("kind", OF_BEFORE)
def test_hashes_of_runs_that_were_started_before(kind):
    """Recorded before the objectives had further settings; runs of then are resumed."""
    settings, expected = OF_BEFORE[kind]
    values = BEFORE | {"objective": {"kind": kind, **settings}}
    assert TrainConfig.model_validate(values).hash()[:16] == expected


def test_hash_of_a_run_with_a_branch_that_was_started_before():
    """Recorded before the objectives had further settings."""
    values = BEFORE | {"objective": {"kind": "simcse"}}
    image = {"data": "i", "objective": {"kind": "supcon"}, "frontend": {}}
    assert TrainConfig.model_validate(values | {"also": {"image": image}}).hash()[:16] == "ceefc96b51be57bb"


def test_a_scaling_that_followed_the_workers_needs_a_number():
    values = {"run": "r", "data": "d", "encoder": {"pretrained": "x"}, "objective": {"released_rank_scaling": True}}
    with pytest.raises(ValidationError, match="give the number to divide by, such as 4"):
        TrainConfig.model_validate(values)


def test_without_a_limit_gradients_are_not_scaled():
    """The norm is reported, and the update is that of an unreachable limit."""
    found = []
    for limit in (None, 1e9, 1e-3):
        optim = OptimConfig(lr=1e-2, max_grad_norm=limit)
        stepper = tiny_stepper(tiny_encoder(), optim=optim)
        metrics = stepper.step(rank_batch(tiny_feed(), documents([48, 70, 49], 12)), 1)
        found.append((metrics.grad_norm, torch.cat([p.flatten() for p in stepper.encoder.parameters()])))
    assert found[0][0] == found[1][0] == found[2][0] > 1e-3
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])
