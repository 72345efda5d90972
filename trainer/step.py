"""One optimizer step: forward, loss of the global batch, exact gradients, clip, update. No Ray, no files.

Legend: n documents on this rank, A anchors a document, B documents of the global batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from common import seeding
from common.logs import get_logger
from trainer.batches import DIGEST, SpanBatch
from trainer.flops import linear_weights, step_flops
from trainer.gather import World
from trainer.microbatch import Microbatch, out_of_memory
from trainer.model import Encoder
from trainer.objectives import Declutr
from trainer.optim import OptimConfig, learning_rate
from trainer.sharding import whole

T = TypeVar("T")


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of a step.

    Attributes:
        spans: the spans of its documents, on the encoder's device.
        start: place of its first document in the global batch.
        num_documents: n; 0 when there are more ranks than documents.
        batch_documents: B.
        digest: of the spans (SpanBatch.digest); 0 where nobody asks for it.
    """

    spans: SpanBatch
    start: int
    num_documents: int
    batch_documents: int
    digest: int = 0


@dataclass(frozen=True)
class Counts:
    """What a rank knows of all ranks' spans; documents may have different numbers of anchors.

    Attributes:
        selected: selected tokens of all ranks.
        first_anchor: place of this rank's first anchor among all.
        num_anchors: anchors of all ranks; 0 where nothing is contrasted.
    """

    selected: int
    first_anchor: int
    num_anchors: int


@dataclass(frozen=True)
class Gradients:
    """What comes out of a backward besides the gradients.

    Attributes:
        contrastive: contrastive loss of the global batch.
        mlm_sum: this rank's MLM loss, summed over its selected tokens.
        num_selected: selected tokens of all ranks.
        embeddings: `(2M, D)` detached embeddings of the global batch; None when no queue remembers them.
    """

    contrastive: Tensor
    mlm_sum: Tensor
    num_selected: int
    embeddings: Tensor | None


@dataclass(frozen=True)
class StepMetrics:
    """What one step measured, over all ranks.

    Attributes:
        loss: contrastive + MLM, unscaled.
        contrastive: contrastive loss of the global batch; 0 when it is not trained.
        mlm: mean cross entropy over the global batch's selected tokens; 0 when nothing is selected.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that went through the encoder, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/flops.py).
        batch_digest: of documents, spans and masks of the global batch; the same for any number of workers.
        skipped: the loss or the gradient was not finite, and the update was left out.
    """

    loss: float
    contrastive: float
    mlm: float
    grad_norm: float
    lr: float
    num_selected: int
    num_tokens: int
    padding_share: float
    flops: float
    batch_digest: int
    skipped: bool = False


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
        objective: the contrastive half of the loss; holds the queue.
        optimizer: over the encoder's trainable parameters.
        optim: rates and clipping.
        world: the workers.
        seed: the run's seed, for dropout.
        total_steps: T of the schedule.
        microbatch: how much goes through the encoder at once.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' own.
    """

    encoder: Encoder
    objective: Declutr
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
        found = self.gradients(batch, step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.world.sum_gradients(parameters)
        norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm)))
        contrastive, mlm_sum = float(found.contrastive), found.mlm_sum
        places = sum(self.encoder.token_places(piece) for piece in self.microbatch.cut(batch.spans))
        flops = step_flops(self.encoder.model, self.weights, batch.spans.lengths, len(batch.spans.labels))
        counts = mlm_sum.new_tensor([batch.spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.world.sum(torch.cat([mlm_sum.double()[None], counts])).tolist()
        mlm = totals[0] / max(1, found.num_selected)
        loss = contrastive + mlm
        measured = StepMetrics(
            loss=loss,
            contrastive=contrastive,
            mlm=mlm,
            grad_norm=norm,
            lr=learning_rate(self.optim, step, self.total_steps),
            num_selected=found.num_selected,
            num_tokens=int(totals[1]),
            padding_share=1 - totals[1] / max(1.0, totals[2]),
            flops=totals[3],
            batch_digest=int(totals[4]) % DIGEST,
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {step}: loss {loss} (contrastive {contrastive}, mlm {mlm}), gradient norm {norm}: not "
                f"finite, nothing was updated. Try a smaller optim.lr (now {self.optim.lr}), a larger temperature, or "
                "precision: fp32",
                replace(measured, skipped=True),
            )
        for group in self.optimizer.param_groups:
            group["lr"] = measured.lr
        self.optimizer.step()
        if found.embeddings is not None:
            self.objective.remember(found.embeddings)
        return measured

    def gradients(self, batch: RankBatch, step: int) -> Gradients:
        """Accumulates this rank's part of the global gradient in the encoder's parameters.

        One forward when everything fits. Otherwise two passes (GradCache, Gao et al. 2021): embeddings without a graph,
        the loss's gradient with respect to them, then each microbatch again with its graph and the same dropout. The
        result does not depend on how the spans were cut, so a step that ran out of memory is simply taken again.

        Raises:
            MicrobatchError: memory is not enough for a single span.
        """
        while True:
            found = self._attempt(batch, step)
            if found is not None:
                return found
            self.optimizer.zero_grad(set_to_none=True)
            self.microbatch.lower(batch.spans, self.world)
            get_logger().warning("step %d: out of memory, now %s tokens at once", step, self.microbatch.max_tokens)

    def _attempt(self, batch: RankBatch, step: int) -> Gradients | None:
        """One try; None, on every rank alike, when the memory of one rank was not enough.

        Ranks agree before and after the one exchange of embeddings, so that none waits there for one that failed.
        """
        pieces = self._pieces(batch.spans)
        counts = self._count(batch.spans)
        embedded = self._all_fit(lambda: self._embed(pieces, step))
        if embedded is None:
            return None
        return self._all_fit(lambda: self._differentiate(batch, pieces, embedded, counts, step))

    def _count(self, spans: SpanBatch) -> Counts:
        own = [0] * self.world.size
        if self.objective.config.contrastive:
            own[self.world.rank] = self.objective.anchors_in(spans.num_spans)
        selected, *anchors = self.world.sum(spans.labels.new_tensor([len(spans.labels), *own])).tolist()
        return Counts(selected, sum(anchors[: self.world.rank]), sum(anchors))

    def _pieces(self, spans: SpanBatch) -> list[SpanBatch]:
        """The microbatches of a share; as many as any rank's, the last ones empty, where the encoder is sharded."""
        pieces = self.microbatch.cut(spans)
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.world.largest(len(pieces)) - len(pieces))

    def _embed(self, pieces: list[SpanBatch], step: int) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece: with their graph when there is one piece, else without."""
        if len(pieces) > 1 and not self.objective.config.contrastive:
            return []  # nothing crosses pieces, one pass is enough
        with torch.set_grad_enabled(len(pieces) == 1):
            return [self._forward(piece, number, step) for number, piece in enumerate(pieces)]

    def _differentiate(
        self,
        batch: RankBatch,
        pieces: list[SpanBatch],
        embedded: list[tuple[Tensor, Tensor]],
        counts: Counts,
        step: int,
    ) -> Gradients:
        share = 1.0 / max(1, counts.selected)
        if len(pieces) == 1:
            spans, mlm_sum = embedded[0]
            contrastive, embeddings = self._contrast(spans, batch, counts)
            _backward(contrastive + mlm_sum * share)
            return Gradients(contrastive.detach(), mlm_sum.detach(), counts.selected, embeddings)
        contrastive, gradient, embeddings = self._through_loss(embedded, batch, counts)
        sizes = [piece.num_spans for piece in pieces]
        upstream = [None] * len(pieces) if gradient is None else gradient.split(sizes)
        mlm_total = contrastive.new_zeros(())
        for number, (piece, towards) in enumerate(zip(pieces, upstream, strict=True)):
            spans, mlm_sum = self._forward(piece, number, step)
            through_spans = 0.0 if towards is None else (spans * towards).sum()
            _backward(through_spans + mlm_sum * share)
            mlm_total = mlm_total + mlm_sum.detach()
        return Gradients(contrastive, mlm_total, counts.selected, embeddings)

    def _through_loss(
        self, embedded: list[tuple[Tensor, Tensor]], batch: RankBatch, counts: Counts
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The contrastive loss, its gradient towards this rank's span embeddings, and the embeddings to remember.

        Nothing else of the loss outlives this call: the second pass needs the memory.
        """
        if not embedded:
            nothing = torch.zeros((), device=batch.spans.input_ids.device)
            return nothing, None, None
        cached = torch.cat([spans for spans, _ in embedded])
        embedded.clear()
        cached.requires_grad_(True)
        contrastive, embeddings = self._contrast(cached, batch, counts)
        _backward(contrastive)
        return contrastive.detach(), cached.grad, embeddings

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

    def _contrast(self, spans: Tensor, batch: RankBatch, counts: Counts) -> tuple[Tensor, Tensor | None]:
        if not self.objective.config.contrastive:
            return spans.new_zeros(()), None
        views = self.objective.represent(spans, batch.num_documents)
        loss, embeddings = self.objective.loss(views, counts.first_anchor, counts.num_anchors, self.world)
        return loss, embeddings if self.objective.config.queue_size else None

    def _forward(self, piece: SpanBatch, number: int, step: int) -> tuple[Tensor, Tensor]:
        """Embeddings and MLM loss of a microbatch.

        Dropout is keyed by token (trainer/dropout.py). Only the padded layout's attention dropout is torch's own; it is
        keyed by (seed, step, rank, microbatch) here, so that the second pass repeats the first.
        """
        device = piece.input_ids.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), self._autocast(device):
            torch.manual_seed(seeding.torch_seed(self.seed, "dropout", step, self.world.rank, number))
            embeddings, mlm_sum = self.encoder(piece)
        return embeddings, mlm_sum

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None)


def _backward(loss: Tensor) -> None:
    """Backward where there is a graph: not on a rank without documents, not where nothing was selected."""
    if loss.requires_grad:
        loss.backward()
