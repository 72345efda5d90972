"""Learning rates against transformers' schedulers; runs without clipping; settings that have no effect."""

import pytest
import torch
from messages import all_of
from pydantic import ValidationError
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from transformers import get_scheduler

from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.optim import learning_rate

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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_ratio": 0.1}, ("no effect", "schedule = slanted_triangular")),
        ({"schedule": "linear", "cut_fraction": 0.2}, ("no effect", "schedule = linear")),
        ({"schedule": "cosine", "ratio": 8}, ("no effect", "schedule = cosine")),
        ({"schedule": "triangular"}, "slanted_triangular"),
        ({"max_grad_norm": 0}, "greater than 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValidationError, match=all_of(message)):
        OptimConfig(**settings)


def test_settings_that_change_the_result_change_the_hash():
    config = {"run": "r", "data": "d", "encoder": {"pretrained": "x"}}
    plain = TrainConfig.model_validate(config).hash()
    for changed in (
        {"precision": "bf16"},
        {"encoder": {"pretrained": "x", "num_trainable_layers": 2}},
        {"encoder": {"pretrained": "x", "new_mlm_head": True}},
        {"optim": {"schedule": "linear"}},
        {"optim": {"schedule": "constant", "warmup_ratio": 0.1}},
        {"optim": {"max_grad_norm": None}},
        {"validation": {"stsb": "sts"}},
        {"validation": {"data": "other"}},
        {"objective": {"reference_rank_scaling": 4}},
    ):
        assert TrainConfig.model_validate(config | changed).hash() != plain


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
