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
    """What one step measured, over all ranks.

    Attributes:
        loss: sum of the terms.
        terms: terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A
            term that is not trained is 0.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that went through the encoder, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/model/flops.py).
        batch_digest: of documents, spans and masks of the global batch; the same for any number of workers.
        skipped: the loss or the gradient was not finite, and the update was left out.
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
        """The numbers by name, each term under its own, as `metrics.jsonl` holds them."""
        numbers = asdict(self)
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers}


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not a finite number; the parameters are those of the step before.

    Attributes:
        measured: what the step measured, where there was one.
    """

    def __init__(self, message: str, measured: StepMetrics | None = None) -> None:
        super().__init__(message)
        self.measured = measured


@dataclass(frozen=True)
class Stepper:
    """Everything a step needs besides its batch.

    Attributes:
        encoder: the model, in training mode.
        objective: the loss on the views of the global batch.
        optimizer: over the trainable parameters of encoder and objective.
        optim: rates and clipping.
        world: the workers.
        seed: the run's seed, for dropout.
        total_steps: T of the schedule.
        microbatch: how much goes through the encoder at once.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' own.
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
        """Weights of the encoder's linear layers."""
        return linear_weights(self.encoder.model)

    def step(self, batch: RankBatch, step: int) -> StepMetrics:
        """Runs the 1-based optimizer step `step`.

        Raises:
            NonFiniteLossError: before anything is updated, on every rank alike.
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
                f"not finite, nothing was updated. Try a smaller optim.lr (now {self.optim.lr}), a larger temperature, "
                "or precision: fp32",
                measured,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = measured.lr
        self.optimizer.step()
        if found.gathered is not None:
            self.objective.remember(found.gathered)
        return measured

    def _measure(self, batch: RankBatch, step: int, found: Gradients, norm: float) -> StepMetrics:
        """The numbers of a step over all ranks; `skipped` where one of them is not finite."""
        mlm_sum = found.mlm_sum
        places = sum(self.encoder.token_places(piece) for piece in self.microbatch.cut(batch.spans))
        flops = step_flops(self.encoder.model, self.weights, batch.spans.lengths, len(batch.spans.labels))
        counts = mlm_sum.new_tensor([batch.spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.world.sum(torch.cat([mlm_sum.double()[None], counts])).tolist()
        values = {name: float(value) for name, value in found.terms.items()}
        values["mlm"] = totals[0] / max(1, found.num_selected)
        terms = {name: values.get(name, 0.0) for name in self.objective.config.metrics}
        loss = sum(terms.values())
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
        """Puts back the objective's buffers as they were before a step that does not count."""
        with torch.no_grad():
            for buffer, before in zip(self.objective.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def gradients(self, batch: RankBatch, step: int) -> Gradients:
        """Accumulates this rank's part of the global gradient in the parameters of encoder and objective.

        The result does not depend on how the spans are cut (trainer/step/gradcache.py), so a step that ran out of
        memory is simply taken again.

        Raises:
            MicrobatchError: memory is not enough for a single span.
        """
        buffers = [buffer.clone() for buffer in self.objective.buffers()]
        while True:
            found = self._attempt(batch, step)
            if found is not None:
                return found
            self.optimizer.zero_grad(set_to_none=True)
            self._restore(buffers)
            self.microbatch.lower(batch.spans, self.world)
            get_logger().warning("step %d: out of memory, now %s tokens at once", step, self.microbatch.max_tokens)

    def _attempt(self, batch: RankBatch, step: int) -> Gradients | None:
        """One try; None, on every rank alike, when the memory of one rank was not enough.

        Ranks agree before and after the one exchange of embeddings, so that none waits there for one that failed.
        """
        passes = GradCache(self.encoder, self.objective, self.world, self.seed, step, self.autocast)
        pieces = self._pieces(batch.spans)
        counts = passes.count(batch)
        embedded = self._all_fit(lambda: passes.embed(pieces))
        if embedded is None:
            return None
        return self._all_fit(lambda: passes.differentiate(batch, pieces, embedded, counts))

    def _pieces(self, spans: SpanBatch) -> list[SpanBatch]:
        """The microbatches of a share; as many as any rank's, the last ones empty, where the encoder is sharded."""
        pieces = self.microbatch.cut(spans)
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.world.largest(len(pieces)) - len(pieces))

    def _all_fit(self, work: Callable[[], T]) -> T | None:
        """The work's result; None, on every rank alike, when memory ran out on one and the microbatch is automatic."""
        if not self.microbatch.automatic:
            return work()
        result = None
        try:
            result = work()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        return None if self.world.largest(int(result is None)) else result
