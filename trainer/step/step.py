"""One optimizer step: exact gradients of the global batch's loss, clip, update. No Ray, no files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from declutr.common.console.logs import get_logger
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.parallel.overlap import BucketedReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Gradients
from declutr.trainer.step.optim import clip_gradients, learning_rate
from declutr.trainer.step.step_metrics import HostCopy, NonFiniteLossError, PendingStep, StepMetrics
from declutr.trainer.step.task import TrainTask
from declutr.trainer.step.task_totals import DeviceTotals

__all__ = ["NonFiniteLossError", "StepMetrics", "TrainStep"]


@dataclass(frozen=True, kw_only=True)
class TrainStep(TrainTask):
    """Takes optimizer steps of a task; holds everything that a step needs except its batch.

    Attributes:
        optimizer: optimizer of the parameters that the task trains.
        optim: settings of the learning rate and of clipping.
        total_steps: T of the schedule.
        joined: tasks whose gradients are part of the same update.
        late: do not wait for the loss before the update; the optimizer's `found_inf` leaves out an update on the
            device. Needs a fused optimizer, and objectives without buffers that remember nothing.
    """

    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    total_steps: int
    joined: tuple[TrainTask, ...] = ()
    late: bool = False

    def step(self, batch: RankBatch, step: int) -> StepMetrics:
        """Runs the 1-based optimizer step `step`.

        Raises:
            NonFiniteLossError: the loss or gradient is not finite; on every rank, before anything is updated.
        """
        return self.begin(batch, step).read()

    def begin(self, batch: RankBatch, step: int) -> PendingStep:
        """Runs the 1-based optimizer step `step`; nothing is updated if the loss or gradient is not finite."""
        self._clear()
        buffers = [task.buffers() for task in (self, *self.joined)]
        found = self.gradients(batch, step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._sum(parameters)
        norm = clip_gradients(parameters, self.optim.max_grad_norm)
        rate = learning_rate(self.optim, step, self.total_steps)
        parts = [DeviceTotals.of(self, batch, found)]
        parts += [DeviceTotals.of(each, batch.auxiliary[each.name], found.auxiliary[each.name]) for each in self.joined]
        values = torch.cat([norm.double().view(1), *(part.numbers for part in parts)])
        pending = PendingStep(
            HostCopy(values),
            lambda numbers: _metrics(parts, numbers, rate),
            lambda measured: self._nonfinite_message(measured, step),
        )
        if self.late:
            self.optimizer.found_inf = (~values.isfinite().all()).float()  # type: ignore[attr-defined]
        elif pending.metrics.skipped:
            self._restore(buffers)
            return pending
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for task, one in ((self, found), *((each, found.auxiliary[each.name]) for each in self.joined)):
            if one.gathered is not None:
                task.objective.remember(one.gathered)
        return pending

    def _clear(self) -> None:
        """Forgets all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        for reducer in (self.reducer, self._overlap):
            if reducer is not None:
                reducer.begin()

    @property
    def _overlap(self) -> BucketedReducer | None:
        """Sums that start during the last backward, which is that of the last task."""
        return (self, *self.joined)[-1].overlap

    def _sum(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replaces each gradient by its sum over ranks; NaN if fixed-point sums could overflow."""
        if self.reducer is None:
            summed: set[int] = set()
            if self._overlap is not None:
                self._overlap.finish()
                summed = {id(p) for bucket in self._overlap.buckets for p in bucket.parameters}
            self.comm.all_reduce_gradients([p for p in parameters if id(p) not in summed])
        elif not self.reducer.finish():
            message = (
                "a microbatch's gradient has an entry that is not finite or not below %g (scaling.elastic_determinism)"
            )
            get_logger().warning(message, self.reducer.limit)

    def _nonfinite_message(self, measured: StepMetrics, step: int) -> str:
        """Message about a loss or gradient that is not finite."""
        named = f"step {step}: " if not self.name else f"step {step}, task {self.name}: "
        return (
            f"{named}loss {measured.loss} "
            f"({', '.join(f'{name} {value}' for name, value in measured.terms.items())}), gradient norm "
            f"{measured.grad_norm}: not finite, nothing was updated{' by this task' if self.name else ''}. Try a "
            f"smaller {f'auxiliary_tasks.{self.name}.' if self.name else ''}optim.lr (now {self.optim.lr}), a larger "
            "temperature if the loss has one, or precision: fp32"
        )

    def gradients(self, batch: RankBatch, step: int) -> Gradients:
        """Accumulates this rank's part of the global gradient in the parameters of encoder, objectives and frontends.

        A step that ran out of memory is repeated with smaller pieces.

        Raises:
            MicrobatchError: memory is too small for a single span.
        """
        parts: list[tuple[TrainTask, RankBatch]] = [
            (self, batch),
            *((each, batch.auxiliary[each.name]) for each in self.joined),
        ]
        buffers = [task.buffers() for task, _ in parts]
        while True:
            found = []
            for task, part in parts:
                one = task.attempt(part, step)
                if one is None:
                    break
                found.append(one)
            else:
                auxiliary = {task.name: one for task, one in zip(self.joined, found[1:], strict=True)}
                return replace(found[0], auxiliary=auxiliary)
            self._clear()
            self._restore(buffers)
            task.microbatch.lower(part.spans, self.comm)
            limit = task.microbatch.max_tokens
            get_logger().warning("step %d: out of memory, repeating it with at most %s tokens a forward", step, limit)

    def _restore(self, buffers: list[list[Tensor]]) -> None:
        for task, before in zip((self, *self.joined), buffers, strict=True):
            task.restore(before)


def _metrics(parts: Sequence[DeviceTotals], numbers: list[float], rate: float) -> StepMetrics:
    """The metrics of a step over all ranks; `skipped` if the loss or the gradient norm is not finite."""
    norm, *rest = numbers
    read = []
    for part in parts:
        size = len(part.numbers)
        read.append(part.totals(rest[:size]))
        rest = rest[size:]
    loss = sum(one.loss for one in read)
    places, tokens = sum(one.places for one in read), sum(one.tokens for one in read)
    auxiliary: dict[str, float] = {
        f"{part.label}batch_digest": one.digest for part, one in zip(parts[1:], read[1:], strict=True)
    }
    return StepMetrics(
        loss=loss,
        terms={name: value for one in read for name, value in one.terms.items()},
        grad_norm=norm,
        lr=rate,
        num_selected=sum(part.num_selected for part in parts),
        num_tokens=int(tokens),
        padding_share=1 - tokens / max(1.0, places),
        flops=sum(one.flops for one in read),
        batch_digest=read[0].digest,
        skipped=not (math.isfinite(loss) and math.isfinite(norm)),
        auxiliary=auxiliary,
    )
