"""Two programs that compute the gradient of the same step, compared in turns within one run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        name: name in the figures.
        model: model whose gradients it computes.
        prepare: lays out a batch; not timed.
        gradients: computes loss and gradient of a laid-out batch.
        places: token places that its forward passes compute, including padding.
    """

    name: str
    model: nn.Module
    prepare: Callable[[Any], Any]
    gradients: Callable[[Any], Tensor]
    places: Callable[[Any], int]


def run(side: Side, batch: Any, device: torch.device) -> tuple[float, float]:
    """Run one step; return seconds and loss. The gradient stays in the side's model."""
    side.model.zero_grad(set_to_none=True)
    prepared = side.prepare(batch)
    _finish(device)
    begun = time.perf_counter()
    loss = side.gradients(prepared)
    _finish(device)
    return time.perf_counter() - begun, float(loss)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def equality(ours: Side, other: Side, batch: Any, device: torch.device) -> tuple[float, float]:
    """Difference of the losses, and the largest difference of a gradient's entries over the largest entry."""
    loss_diff = abs(run(ours, batch, device)[1] - run(other, batch, device)[1])
    theirs = dict(other.model.named_parameters())
    diffs, largest = [0.0], [1e-30]
    for name, parameter in ours.model.named_parameters():
        expected = theirs[name].grad
        if parameter.grad is None or expected is None:
            continue
        diffs.append(float((parameter.grad - expected).abs().max()))
        largest.append(float(expected.abs().max()))
    return loss_diff, max(diffs) / max(largest)


def compare(ours: Side, other: Side, batches: Sequence[Any], warm_up: int, device: torch.device) -> dict[str, Any]:
    """Measure the steps of both sides in turns; return seconds and ratios."""
    seconds: dict[str, list[float]] = {other.name: [], ours.name: []}
    for number, batch in enumerate(batches):
        for side in (other, ours):
            taken, _ = run(side, batch, device)
            if number >= warm_up:
                seconds[side.name].append(round(taken, 6))
            record.progress(f"{'warm-up' if number < warm_up else 'step'} {number} {side.name} {taken:.3f} s")
    return {"times": seconds, **record.ratios(seconds[other.name], seconds[ours.name])}
