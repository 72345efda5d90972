"""Metrics read after the update, as on a GPU: the same figures, and no update by a loss that is not finite."""

import copy
import dataclasses
import math

import pytest
import torch
from measures import deviation
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.microbatch import out_of_memory
from declutr.trainer.step.nonfinite_losses import NonFiniteLossError, NonFiniteLosses
from declutr.trainer.step.optim import UncorrectedAdamW, build_optimizer
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
