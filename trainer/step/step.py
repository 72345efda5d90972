"""One optimizer step: exact gradients of the global batch's loss, clip, update, metrics. No Ray, no files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from declutr.common.console.logs import get_logger
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.parallel.communicator import Agreement, Communicator
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import SPREAD, Gradients
from declutr.trainer.step.optim import clip_gradients, learning_rate
from declutr.trainer.step.task import NUM_COUNTS, TrainTask


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not finite; the parameters were not changed."""


@dataclass
class NonFiniteLosses:
    """Counts the updates that were left out because their loss was not finite, if `on_nonfinite_loss` allows it."""

    skip: bool = False  # skip such steps (`on_nonfinite_loss: skip`) instead of stopping
    most_in_a_row: int = 0  # `max_skipped_steps`
    skipped: int = 0  # steps so far whose update was skipped
    in_a_row: int = 0  # skipped steps since the last good one

    def add(
        self,
        step: int,  # 1-based number of the step
        name: str,  # name of the update's task
        problem: str | None,  # what is not finite; None: nothing
    ) -> None:
        """Counts a step that was taken; a skipped one used up its documents and changed nothing else."""
        if problem is None:
            self.in_a_row = 0
            return
        if not self.skip:
            raise NonFiniteLossError(problem)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.most_in_a_row:  # a run that skips all steps would never end by itself
            raise NonFiniteLossError(
                f"{problem}. {self.in_a_row} such steps in a row exceed max_skipped_steps = {self.most_in_a_row}"
            )
        prefix = f"task {name}: " if name else ""
        get_logger().warning("step %d: %sloss or gradient not finite, skipped (%d so far)", step, prefix, self.skipped)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks."""

    loss: float  # sum of the terms; `mlm` counts with the objective's `mlm_weight`, a task with its weight
    # terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A term that is
    # not trained is 0. Terms of an auxiliary task have its name in front.
    terms: dict[str, float]
    grad_norm: float  # norm of the gradient before clipping
    lr: float  # learning rate of the update
    num_selected: int  # selected tokens
    num_tokens: int  # tokens that the encoder processed, specials included
    padding_share: float  # share of the encoder's token places that held padding
    flops: float  # multiplications and additions of forward and backward (trainer/step/task.py)
    # digest of the main task's global batch: documents, spans and masks; the same for any number of workers.
    batch_digest: int
    skipped: bool = False  # true if the loss or the gradient was not finite, so that nothing was updated
    # spread of the batch of each task, and further numbers of auxiliary tasks, such as `image_batch_digest`.
    auxiliary: dict[str, float] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The metrics by name, with an entry for each term, as in `metrics.jsonl`."""
        numbers = asdict(self)
        auxiliary = numbers.pop("auxiliary")
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers, **auxiliary}


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Updates the parameters that some tasks train; holds everything that this needs except the batch."""

    tasks: tuple[TrainTask, ...]  # the tasks whose gradients are part of the update; the first one names it
    optimizer: torch.optim.Optimizer  # optimizer of the parameters that the tasks train
    optim: OptimConfig  # settings of the learning rate and of clipping
    total_steps: int  # T of the schedule
    # do not wait for the loss before the update; the optimizer's `found_inf` leaves out an update on the device. Needs
    # a fused optimizer, and objectives without buffers that remember nothing.
    late: bool = False
    nonfinite_losses: NonFiniteLosses = field(default_factory=NonFiniteLosses)  # counts the updates that were left out

    @property
    def name(self) -> str:
        """Name of the update."""
        return self.tasks[0].name

    @property
    def encoder(self) -> Encoder:
        """The encoder that all tasks train."""
        return self.tasks[0].encoder

    @property
    def comm(self) -> Communicator:
        """The workers."""
        return self.tasks[0].comm

    @property
    def _reducer(self) -> FixedPointReducer | None:
        return self.tasks[0].reducer

    @property
    def _overlap(self) -> BucketedReducer | None:
        """Sums that start during the last backward, which is that of the last task."""
        return self.tasks[-1].overlap

    def step(
        self,
        batch: Mapping[str, RankBatch],  # this rank's share of the batch of each task, by name
        step: int,  # the step's number
    ) -> StepMetrics:
        """Runs the 1-based optimizer step `step`."""
        return self.begin(batch, step).read()

    def begin(self, batch: Mapping[str, RankBatch], step: int, agreement: Agreement | None = None) -> "PendingStep":
        """As `step`, but leaves the metrics to be read later. Workers agree on the requests of `agreement` too."""
        self._clear()
        buffers = [task.buffers() for task in self.tasks]
        results = self.gradients(batch, step, agreement)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._sum(parameters)
        norm = clip_gradients(parameters, self.optim.max_grad_norm)
        # before the update: a NaN of any rank stops all
        totals = [task.totals(batch[task.name], result) for task, result in zip(self.tasks, results, strict=True)]
        values = torch.cat([norm.double().view(1), *totals])
        spreads = [result.spread for result in results if result.spread is not None]
        pending = PendingStep(self, step, results, torch.cat([values, *spreads]))
        if self.late:  # the spread may be NaN in a step that is whole
            self.optimizer.found_inf = (~values.isfinite().all()).float()  # type: ignore[attr-defined]
        elif pending.metrics.skipped:
            self._restore(buffers)
            return pending
        for group in self.optimizer.param_groups:
            group["lr"] = pending.rate
        self.optimizer.step()
        torch.autograd.graph.increment_version(parameters)  # fused optimizers do not (trainer/model/half.py)
        for task, result in zip(self.tasks, results, strict=True):
            if result.gathered is not None:
                task.objective.remember(result.gathered)
        return pending

    def warm_up(self, batch: Mapping[str, RankBatch]) -> None:
        """Computes the gradients of a batch and forgets them, so that a process chooses its kernels for this batch.

        Inductor chooses them for the first sizes that it meets, and a resumed process would meet others.
        """
        buffers = [task.buffers() for task in self.tasks]
        self._clear()
        self.gradients(batch, 1)
        self._sum([p for group in self.optimizer.param_groups for p in group["params"]])  # those under way end
        self._clear()
        self._restore(buffers)

    def gradients(
        self, batch: Mapping[str, RankBatch], step: int, agreement: Agreement | None = None
    ) -> list[Gradients]:
        """Adds this rank's part of the global gradient to the parameters of all tasks; returns the result of each task.

        A step that ran out of memory is repeated with smaller pieces.
        """
        buffers = [task.buffers() for task in self.tasks]
        while True:
            results = list[Gradients]()
            for task in self.tasks:
                result = task.attempt(batch[task.name], step, agreement if task is self.tasks[-1] else None)
                if result is None:
                    break
                results.append(result)
            else:
                return results
            self._clear()
            self._restore(buffers)
            task.microbatch.lower(batch[task.name].spans, self.comm)
            limit = task.microbatch.max_tokens
            get_logger().warning("step %d: out of memory, repeating it with at most %s tokens a forward", step, limit)

    def _clear(self) -> None:
        """Forgets all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        for reducer in (self._reducer, self._overlap):
            if reducer is not None:
                reducer.begin()

    def _sum(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replaces each gradient by its sum over ranks; NaN if fixed-point sums could overflow."""
        if self._reducer is None:
            summed: set[int] = set()
            if self._overlap is not None:
                self._overlap.finish()
                summed = {id(p) for bucket in self._overlap.buckets for p in bucket.parameters}
            self.comm.all_reduce_gradients([p for p in parameters if id(p) not in summed])
        elif not self._reducer.finish():
            message = (
                "a microbatch's gradient has an entry that is not finite or not below %g (scaling.elastic_determinism)"
            )
            get_logger().warning(message, self._reducer.limit)

    def _restore(self, buffers: Sequence[list[Tensor]]) -> None:
        for task, before in zip(self.tasks, buffers, strict=True):
            task.restore(before)


@dataclass
class PendingStep:
    """An update whose numbers are on their way to the CPU: read one step late, so that it does not wait for the GPU."""

    train_step: TrainStep  # the train step
    step: int  # 1-based number of the step
    results: list[Gradients]  # results of each task
    # `(n,)` float64: the gradient's norm, `TrainTask.totals` of each task, and the spread of each task that has one.
    # The copy from a GPU starts at once, and nothing waits for it.
    values: Tensor

    def __post_init__(self) -> None:
        """Starts the copy."""
        self._copied: torch.cuda.Event | None = None
        self._counted = False
        if self.values.is_cuda:
            values = self.values
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def rate(self) -> float:
        """Learning rate of the update."""
        return learning_rate(self.train_step.optim, self.step, self.train_step.total_steps)

    @cached_property
    def metrics(self) -> StepMetrics:
        """The metrics over all ranks, also of an update that was left out; waits until the numbers have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        tasks = self.train_step.tasks
        sizes = [1, *(NUM_COUNTS + len(result.terms) for result in self.results)]
        spread = [task for task, result in zip(tasks, self.results, strict=True) if result.spread is not None]
        parts = self.values.split([*sizes, *([len(SPREAD)] * len(spread))])
        (norm,), *totals = (part.tolist() for part in parts[: len(sizes)])
        spreads = zip(spread, parts[len(sizes) :], strict=True)
        losses = [task.losses(*arguments) for task, *arguments in zip(tasks, self.results, totals, strict=True)]
        loss = sum(task_loss for task_loss, _ in losses)
        counts = [total[:NUM_COUNTS] for total in totals]
        _, tokens, places, flops, _ = (sum(column) for column in zip(*counts, strict=True))
        digest, *task_digests = (int(row[-1]) % DIGEST for row in counts)
        return StepMetrics(
            loss=loss,
            terms={name: value for _, terms in losses for name, value in terms.items()},
            grad_norm=norm,
            lr=self.rate,
            num_selected=sum(result.num_selected for result in self.results),
            num_tokens=int(tokens),
            padding_share=1 - tokens / max(1.0, places),
            flops=flops,
            batch_digest=digest,
            # the norm too: finite losses may have infinite gradients
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
            auxiliary={f"{task.label}batch_digest": value for task, value in zip(tasks[1:], task_digests, strict=True)}
            | {
                f"{task.label}{name}": value
                for task, values in spreads
                for name, value in zip(SPREAD, values.tolist(), strict=True)
            },
        )

    def read(self) -> StepMetrics:
        """The metrics; the update is counted if it was left out."""
        if not self._counted:
            self._counted = True
            problem = self._problem() if self.metrics.skipped else None
            self.train_step.nonfinite_losses.add(self.step, self.train_step.name, problem)
        return self.metrics

    def _problem(self) -> str:
        """Message about a loss or gradient that is not finite."""
        metrics, name = self.metrics, self.train_step.name
        return (
            f"step {self.step}{f', task {name}' if name else ''}: loss {metrics.loss} "
            f"({', '.join(f'{term} {value}' for term, value in metrics.terms.items())}), gradient norm "
            f"{metrics.grad_norm}: not finite, nothing was updated{' by this task' if name else ''}. Try a smaller "
            f"{f'auxiliary_tasks.{name}.' if name else ''}optim.lr (now {self.train_step.optim.lr}), a larger "
            "temperature if the loss has one, or precision: fp32"
        )
