"""Metrics of a step, and their way from the device: on a GPU they are read while the next step is computed."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks.

    Attributes:
        loss: sum of the terms; `mlm` counts with the objective's `mlm_weight`, a task with its weight.
        terms: terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A
            term that is not trained is 0. Terms of an auxiliary task have its name in front.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that the encoder processed, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/model/flops.py).
        batch_digest: digest of the main task's global batch: documents, spans and masks; the same for any number of
            workers.
        skipped: true if the loss or the gradient was not finite, so that nothing was updated.
        auxiliary: further numbers of auxiliary tasks, such as `image_batch_digest`.
    """

    loss: float
    terms: dict[str, float]
    grad_norm: float
    lr: float
    num_selected: int
    num_tokens: int
    padding_share: float
    flops: float
    batch_digest: int
    skipped: bool = False
    auxiliary: dict[str, float] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The metrics by name, with an entry for each term, as in `metrics.jsonl`."""
        numbers = asdict(self)
        auxiliary = numbers.pop("auxiliary")
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers, **auxiliary}


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not finite; the parameters were not changed.

    Attributes:
        measured: metrics of the step; None if it must not be skipped.
    """

    def __init__(self, message: str, measured: StepMetrics | None = None) -> None:
        super().__init__(message)
        self.measured = measured


class HostCopy:
    """Numbers on their way from a device to the CPU.

    Args:
        values: `(n,)` float64 numbers. The copy from a GPU starts at once, and nothing waits for it.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def numbers(self) -> list[float]:
        """The numbers; waits until they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[float] = self._values.tolist()
        return found


@dataclass(frozen=True)
class PendingStep:
    """A step that was taken and whose metrics were not read yet.

    Attributes:
        copy: numbers that the metrics need.
        measure: computes the metrics of these numbers.
        describe: the message about a loss that is not finite.
    """

    copy: HostCopy
    measure: Callable[[list[float]], StepMetrics]
    describe: Callable[[StepMetrics], str]

    @cached_property
    def metrics(self) -> StepMetrics:
        """The metrics, also those of a step whose update was left out."""
        return self.measure(self.copy.numbers())

    def read(self) -> StepMetrics:
        """The metrics.

        Raises:
            NonFiniteLossError: the loss or gradient is not finite, so the update was left out; on every rank.
        """
        if self.metrics.skipped:
            raise NonFiniteLossError(self.describe(self.metrics), self.metrics)
        return self.metrics
