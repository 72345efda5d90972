"""One optimizer step: exact gradients of the global batch's loss, clip, update. No Ray, no files."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from common.console.logs import get_logger
from trainer.data.batches import DIGEST, RankBatch, SpanBatch
from trainer.model.encoder import Encoder
from trainer.model.flops import linear_weights, step_flops
from trainer.objectives.base import Objective
from trainer.parallel.world import World
from trainer.step.gradcache import GradCache, Gradients
from trainer.step.microbatch import Microbatch, out_of_memory
from trainer.step.optim import clip_gradients, learning_rate
from trainer.step.settings import OptimConfig

T = TypeVar("T")


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks.

    Attributes:
        loss: sum of the terms; `mlm` counts with the objective's `mlm_weight`.
        terms: terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A
            term that is not trained is 0.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that the encoder processed, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/model/flops.py).
        batch_digest: digest of the global batch's documents, spans and masks; the same for any number of workers.
        skipped: true if the loss or the gradient was not finite, so that nothing was updated.
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

    def line(self) -> dict[str, Any]:
        """The metrics by name, with an entry for each term, as in `metrics.jsonl`."""
        numbers = asdict(self)
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers}


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not finite; the parameters were not changed.

    Attributes:
        measured: metrics of the step; None if it must not be skipped.
    """

    def __init__(self, message: str, measured: StepMetrics | None = None) -> None:
        super().__init__(message)
        self.measured = measured


@dataclass(frozen=True)
class Stepper:
    """Takes optimizer steps; holds everything that a step needs except its batch.

    Attributes:
        encoder: the model, in training mode.
        objective: the loss on the views of the global batch.
        optimizer: optimizer of the trainable parameters of encoder and objective.
        optim: settings of the learning rate and of clipping.
        world: the workers.
        seed: the run's seed, for dropout.
        total_steps: T of the schedule.
        microbatch: limit of the tokens in one forward.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' type.
    """

    encoder: Encoder
    objective: Objective[Any]
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    world: World
    seed: int
    total_steps: int
    microbatch: Microbatch = field(default_factory=Microbatch)
    autocast: torch.dtype | None = None

    @cached_property
    def weights(self) -> int:
        """Number of weights in the encoder's linear layers."""
        return linear_weights(self.encoder.model)

    def step(self, batch: RankBatch, step: int) -> StepMetrics:
        """Runs the 1-based optimizer step `step`.

        Raises:
            NonFiniteLossError: the loss or gradient is not finite; on every rank, before anything is updated.
        """
        self.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in self.objective.buffers()]  # a BatchNorm's statistics, for example
        found = self.gradients(batch, step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.world.sum_gradients(parameters)
        norm = clip_gradients(parameters, self.optim.max_grad_norm)
        measured = self._measure(batch, step, found, norm)
        if measured.skipped:
            self._restore(buffers)
            raise NonFiniteLossError(
                f"step {step}: loss {measured.loss} "
                f"({', '.join(f'{name} {value}' for name, value in measured.terms.items())}), gradient norm {norm}: "
                f"not finite, nothing was updated. Try a smaller optim.lr (now {self.optim.lr}), a larger "
                "temperature if the loss has one, or precision: fp32",
                measured,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = measured.lr
        self.optimizer.step()
        if found.gathered is not None:
            self.objective.remember(found.gathered)
        return measured

    def _measure(self, batch: RankBatch, step: int, found: Gradients, norm: float) -> StepMetrics:
        """The metrics of a step over all ranks; `skipped` if the loss or the gradient norm is not finite."""
        mlm_sum = found.mlm_sum
        places = sum(self.encoder.token_places(piece) for piece in self.microbatch.cut(batch.spans))
        flops = step_flops(self.encoder.model, self.weights, batch.spans.lengths, len(batch.spans.labels))
        counts = mlm_sum.new_tensor([batch.spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.world.sum(torch.cat([mlm_sum.double()[None], counts])).tolist()
        values = {name: float(value) for name, value in found.terms.items()}
        values["mlm"] = totals[0] / max(1, found.num_selected)
        terms = {name: values.get(name, 0.0) for name in self.objective.config.metrics}
        weights = {"mlm": self.objective.config.mlm_weight}
        loss = sum(weights.get(name, 1.0) * value for name, value in terms.items())
        return StepMetrics(
            loss=loss,
            terms=terms,
            grad_norm=norm,
            lr=learning_rate(self.optim, step, self.total_steps),
            num_selected=found.num_selected,
            num_tokens=int(totals[1]),
            padding_share=1 - totals[1] / max(1.0, totals[2]),
            flops=totals[3],
            batch_digest=int(totals[4]) % DIGEST,
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
        )

    def _restore(self, buffers: list[Tensor]) -> None:
        """Restores the objective's buffers to their values before a step that failed."""
        with torch.no_grad():
            for buffer, before in zip(self.objective.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def gradients(self, batch: RankBatch, step: int) -> Gradients:
        """Accumulates this rank's part of the global gradient in the parameters of encoder and objective.

        The result does not depend on how the spans are cut (trainer/step/gradcache.py), so a step that ran out of
        memory is repeated with smaller pieces.

        Raises:
            MicrobatchError: memory is too small for a single span.
        """
        buffers = [buffer.clone() for buffer in self.objective.buffers()]
        while True:
            found = self._attempt(batch, step)
            if found is not None:
                return found
            self.optimizer.zero_grad(set_to_none=True)
            self._restore(buffers)
            self.microbatch.lower(batch.spans, self.world)
            limit = self.microbatch.max_tokens
            get_logger().warning("step %d: out of memory, repeating it with at most %s tokens a forward", step, limit)

    def _attempt(self, batch: RankBatch, step: int) -> Gradients | None:
        """Tries the step once; None on every rank if one rank ran out of memory.

        Ranks agree before and after the all-gather of embeddings, so that none waits there for a rank that failed.
        """
        passes = GradCache(self.encoder, self.objective, self.world, self.seed, step, self.autocast)
        pieces = self._pieces(batch.spans)
        counts = passes.count(batch)
        embedded = self._all_fit(lambda: passes.embed(pieces))
        if embedded is None:
            return None
        return self._all_fit(lambda: passes.differentiate(batch, pieces, embedded, counts))

    def _pieces(self, spans: SpanBatch) -> list[SpanBatch]:
        """The microbatches of a share. With a sharded encoder, all ranks get the same number; the last may be empty."""
        pieces = self.microbatch.cut(spans)
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.world.largest(len(pieces)) - len(pieces))

    def _all_fit(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None on every rank if one ran out of memory and the microbatch is automatic."""
        if not self.microbatch.automatic:
            return work()
        result = None
        try:
            result = work()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        return None if self.world.largest(int(result is None)) else result
