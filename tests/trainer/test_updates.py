"""Updates: metrics read after them as on a GPU, learning rates, and microbatches that fit the memory."""

import copy
import dataclasses
import json
import math
import sys

import pytest
import torch
from measures import deviation
from messages import all_of
from processes import run_python
from pydantic import ValidationError
from tiny import documents, random_spans, rank_batch, tiny_collator, tiny_encoder, tiny_train_step
from transformers import get_scheduler

from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.microbatch import Microbatch, MicrobatchError, out_of_memory
from declutr.trainer.step.nonfinite_losses import NonFiniteLossError, NonFiniteLosses
from declutr.trainer.step.optim import UncorrectedAdamW, build_optimizer, learning_rate
from declutr.trainer.worker.scheduler import TaskScheduler, read


def train_step(late, corrected=False):
    encoder = tiny_encoder(dtype=torch.float32)
    optim = OptimConfig(lr=1e-2, bias_correction=corrected)
    return tiny_train_step(encoder, optim=optim, optimizer=build_optimizer(optim, encoder, fused=True), late=late)


def batch(number=0):
    return rank_batch(tiny_collator(seed=number), documents([48, 70, 49], 12, seed=number))


def parameters(one):
    return [parameter.detach().clone() for parameter in one.encoder.parameters()]


@pytest.mark.parametrize("corrected", [False, True])
def test_late_metrics_leave_the_steps_the_same(corrected):
    early, late = train_step(False, corrected), train_step(True, corrected)
    expected = [early.step({"": batch(number)}, number).line() for number in (1, 2, 3)]
    pending = [late.begin({"": batch(number)}, number) for number in (1, 2, 3)]
    assert [one.read().line() for one in pending] == expected
    assert all(torch.equal(*pair) for pair in zip(parameters(early), parameters(late), strict=True))


@pytest.mark.parametrize("corrected", [False, True])
def test_a_bad_loss_changes_nothing(corrected):
    """Neither parameters nor moments; the next good step continues as if the bad one had not been."""
    one, other = train_step(True, corrected), train_step(True, corrected)
    for each in (one, other):
        each.step({"": batch(1)}, 1)
    before = parameters(one), copy.deepcopy(one.optimizer.state_dict()["state"])
    one.encoder.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * math.nan)
    pending = one.begin({"": batch(2)}, 2)
    one.encoder.model.get_input_embeddings().weight._backward_hooks.clear()
    assert all(torch.equal(*pair) for pair in zip(before[0], parameters(one), strict=True))
    state = one.optimizer.state_dict()["state"]
    assert all(torch.equal(state[key][name], before[1][key][name]) for key in state for name in state[key])
    with pytest.raises(NonFiniteLossError, match="nothing was updated"):
        pending.read()
    for each in (one, other):
        each.step({"": batch(3)}, 3)
    assert all(torch.equal(*pair) for pair in zip(parameters(one), parameters(other), strict=True))


def test_skipped_steps_are_counted_when_they_are_read():
    one = dataclasses.replace(train_step(True), nonfinite_losses=NonFiniteLosses(skip=True, most_in_a_row=1))
    scheduler = TaskScheduler([one])
    one.encoder.model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * math.nan)
    first, second = scheduler.begin({"": batch(1)}, 1), scheduler.begin({"": batch(2)}, 2)
    assert scheduler.main.nonfinite_losses.skipped == 0
    assert read(first).skipped
    assert scheduler.main.nonfinite_losses.skipped == 1
    with pytest.raises(NonFiniteLossError, match="max_skipped_steps = 1"):
        read(second)


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


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: ../NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_failed_allocation_of_a_library_is_recognised(message):
    assert out_of_memory(RuntimeError(message))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


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


# A process of its own, because the limit on its memory cannot be taken back.
SCRIPT = """
import json, resource, sys
import torch
from tiny import documents, rank_batch, tiny_encoder, tiny_collator, tiny_train_step
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.objectives.declutr.config import DeclutrConfig

torch.set_num_threads(1)
shape = {"hidden_size": 64, "intermediate_size": 8192}
def gradient(microbatch):
    train_step = tiny_train_step(tiny_encoder(from_config=shape, dropout=0.1))
    train_step.tasks[0].microbatch.max_tokens, train_step.tasks[0].microbatch.automatic = microbatch
    batch = rank_batch(tiny_collator(DeclutrConfig()), documents([200] * 50, 12))
    train_step.gradients({"": batch}, 1)
    grads = torch.cat([p.grad.flatten() for p in train_step.encoder.parameters() if p.grad is not None])
    return grads, train_step.tasks[0].microbatch.max_tokens, batch.spans.num_tokens

expected, _, tokens = gradient((500, False))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20, resource.RLIM_INFINITY))
found, limit, _ = gradient((None, True))
worst = float((found - expected).abs().max() / expected.abs().max())
print(json.dumps({"worst": worst, "limit": limit, "tokens": tokens}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory through Linux's RLIMIT_AS and /proc")
def test_a_step_that_runs_out_of_memory_is_taken_again_in_smaller_pieces():
    found = json.loads(run_python("-c", SCRIPT, "300", timeout=240).stdout.splitlines()[-1])
    assert found["limit"] is not None
    assert found["limit"] < found["tokens"]  # the whole share did not fit
    assert found["worst"] < 1e-10


def test_lowering_halves_and_ends():
    spans = random_spans([6, 20, 9])
    microbatch = Microbatch(None, automatic=True)
    microbatch.lower(spans, Communicator())
    assert microbatch.max_tokens == 20
    with pytest.raises(MicrobatchError, match=all_of("one span", "20 tokens")):
        microbatch.lower(spans, Communicator())


def test_microbatch_settings_choose_the_size():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert Microbatch.of(None, cpu) == Microbatch(None, automatic=False)
    assert Microbatch.of(77, gpu) == Microbatch(77, automatic=False)
    assert Microbatch.of("auto", gpu) == Microbatch(None, automatic=True)
    assert Microbatch.of("auto", cpu).max_tokens == 8192
