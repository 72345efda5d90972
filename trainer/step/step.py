"""One optimizer step: exact gradients of the global batch's loss, clip, update. No Ray, no files."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.console.logs import get_logger
from trainer.data.batches import DIGEST, RankBatch
from trainer.model.flops import linear_weights, step_flops
from trainer.parallel.overlap import OverlappedSums
from trainer.step.branch import Branch
from trainer.step.gradcache import Gradients
from trainer.step.optim import clip_gradients, learning_rate
from trainer.step.settings import OptimConfig


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks.

    Attributes:
        loss: sum of the terms; `mlm` counts with the objective's `mlm_weight`, a branch with its weight.
        terms: terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A
            term that is not trained is 0. Terms of an additional branch have its name in front.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that the encoder processed, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/model/flops.py).
        batch_digest: digest of the main branch's global batch: documents, spans and masks; the same for any number of
            workers.
        skipped: true if the loss or the gradient was not finite, so that nothing was updated.
        also: further numbers of additional branches, such as `image_batch_digest`.
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
    also: dict[str, float] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The metrics by name, with an entry for each term, as in `metrics.jsonl`."""
        numbers = asdict(self)
        also = numbers.pop("also")
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers, **also}


class _Counted(NamedTuple):
    """One branch's part of StepMetrics, over all ranks."""

    loss: float
    terms: dict[str, float]
    selected: int
    tokens: float
    places: float
    flops: float
    digest: int


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not finite; the parameters were not changed.

    Attributes:
        measured: metrics of the step; None if it must not be skipped.
    """

    def __init__(self, message: str, measured: StepMetrics | None = None) -> None:
        super().__init__(message)
        self.measured = measured


@dataclass(frozen=True, kw_only=True)
class Stepper(Branch):
    """Takes optimizer steps of a branch; holds everything that a step needs except its batch.

    Attributes:
        optimizer: optimizer of the parameters that the branch trains.
        optim: settings of the learning rate and of clipping.
        total_steps: T of the schedule.
        joined: branches whose gradients are part of the same update.
    """

    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    total_steps: int
    joined: tuple[Branch, ...] = ()

    @cached_property
    def weights(self) -> int:
        """Number of weights in the encoder's linear layers."""
        return linear_weights(self.encoder.model)

    def step(self, batch: RankBatch, step: int) -> StepMetrics:
        """Runs the 1-based optimizer step `step`.

        Raises:
            NonFiniteLossError: the loss or gradient is not finite; on every rank, before anything is updated.
        """
        self._clear()
        buffers = [branch.buffers() for branch in (self, *self.joined)]
        found = self.gradients(batch, step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._sum(parameters)
        norm = clip_gradients(parameters, self.optim.max_grad_norm)
        measured = self._measure(batch, step, found, norm)
        if measured.skipped:
            self._restore(buffers)
            raise NonFiniteLossError(self._bad_loss(measured, step), measured)
        for group in self.optimizer.param_groups:
            group["lr"] = measured.lr
        self.optimizer.step()
        for branch, one in ((self, found), *((each, found.also[each.name]) for each in self.joined)):
            if one.gathered is not None:
                branch.objective.remember(one.gathered)
        return measured

    def _clear(self) -> None:
        """Forgets all gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        for sums in (self.sums, self._overlap):
            if sums is not None:
                sums.begin()

    @property
    def _overlap(self) -> OverlappedSums | None:
        """Sums that start during the last backward, which is that of the last branch."""
        return (self, *self.joined)[-1].overlap

    def _sum(self, parameters: list[torch.nn.Parameter]) -> None:
        """Replaces each gradient by its sum over ranks; NaN if fixed-point sums could overflow."""
        if self.sums is None:
            summed: set[int] = set()
            if self._overlap is not None:
                self._overlap.finish()
                summed = {id(p) for bucket in self._overlap.buckets for p in bucket.parameters}
            self.world.sum_gradients([p for p in parameters if id(p) not in summed])
        elif not self.sums.finish():
            message = "a microbatch's gradient has an entry that is not finite or not below %g (scaling.bitwise)"
            get_logger().warning(message, self.sums.limit)

    def _bad_loss(self, measured: StepMetrics, step: int) -> str:
        """Message about a loss or gradient that is not finite."""
        named = f"step {step}: " if not self.name else f"step {step}, branch {self.name}: "
        return (
            f"{named}loss {measured.loss} "
            f"({', '.join(f'{name} {value}' for name, value in measured.terms.items())}), gradient norm "
            f"{measured.grad_norm}: not finite, nothing was updated{' by this branch' if self.name else ''}. Try a "
            f"smaller {f'also.{self.name}.' if self.name else ''}optim.lr (now {self.optim.lr}), a larger temperature "
            "if the loss has one, or precision: fp32"
        )

    def _measure(self, batch: RankBatch, step: int, found: Gradients, norm: float) -> StepMetrics:
        """The metrics of a step over all ranks; `skipped` if the loss or the gradient norm is not finite."""
        parts = [self._counted(self, batch, found)]
        parts += [self._counted(each, batch.also[each.name], found.also[each.name]) for each in self.joined]
        loss = sum(part.loss for part in parts)
        places = sum(part.places for part in parts)
        tokens = sum(part.tokens for part in parts)
        return StepMetrics(
            loss=loss,
            terms={name: value for part in parts for name, value in part.terms.items()},
            grad_norm=norm,
            lr=learning_rate(self.optim, step, self.total_steps),
            num_selected=sum(part.selected for part in parts),
            num_tokens=int(tokens),
            padding_share=1 - tokens / max(1.0, places),
            flops=sum(part.flops for part in parts),
            batch_digest=parts[0].digest,
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
            also={f"{each.label}batch_digest": part.digest for each, part in zip(self.joined, parts[1:], strict=True)},
        )

    def _counted(self, branch: Branch, batch: RankBatch, found: Gradients) -> "_Counted":
        """Loss and counts of one branch over all ranks."""
        mlm_sum, spans, config = found.mlm_sum, batch.spans, branch.objective.config
        places = sum(self.encoder.token_places(piece) for piece in branch.cut(batch))
        flops = step_flops(self.encoder.model, self.weights, spans.lengths, len(spans.labels))
        counts = mlm_sum.new_tensor([spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.world.sum(torch.cat([mlm_sum.double()[None], counts])).tolist()
        values = {name: float(value) for name, value in found.terms.items()}
        values["mlm"] = totals[0] / max(1, found.num_selected)
        terms = {name: values.get(name, 0.0) for name in config.metrics}
        weights = {"mlm": config.mlm_weight}
        loss = sum(weights.get(name, 1.0) * value for name, value in terms.items())
        return _Counted(
            loss if branch.weight == 1 else branch.weight * loss,
            {f"{branch.label}{name}": value for name, value in terms.items()},
            found.num_selected,
            tokens=totals[1],
            places=totals[2],
            flops=totals[3],
            digest=int(totals[4]) % DIGEST,
        )

    def gradients(self, batch: RankBatch, step: int) -> Gradients:
        """Accumulates this rank's part of the global gradient in the parameters of encoder, objectives and frontends.

        A step that ran out of memory is repeated with smaller pieces.

        Raises:
            MicrobatchError: memory is too small for a single span.
        """
        parts: list[tuple[Branch, RankBatch]] = [
            (self, batch),
            *((each, batch.also[each.name]) for each in self.joined),
        ]
        buffers = [branch.buffers() for branch, _ in parts]
        while True:
            found = []
            for branch, part in parts:
                one = branch.attempt(part, step)
                if one is None:
                    break
                found.append(one)
            else:
                also = {branch.name: one for branch, one in zip(self.joined, found[1:], strict=True)}
                return replace(found[0], also=also)
            self._clear()
            self._restore(buffers)
            branch.microbatch.lower(part.spans, self.world)
            limit = branch.microbatch.max_tokens
            get_logger().warning("step %d: out of memory, repeating it with at most %s tokens a forward", step, limit)

    def _restore(self, buffers: list[list[Tensor]]) -> None:
        for branch, before in zip((self, *self.joined), buffers, strict=True):
            branch.restore(before)
