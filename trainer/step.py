"""One optimizer step: forward, loss of the global batch, exact gradients, clip, update. No Ray, no files.

Legend: n documents on this rank, A anchors a document, B documents of the global batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common import seeding
from trainer.batches import SpanBatch
from trainer.gather import World
from trainer.model import Encoder
from trainer.objectives import Declutr
from trainer.optim import OptimConfig, learning_rate


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of a step.

    Attributes:
        spans: the spans of its documents, on the encoder's device.
        start: place of its first document in the global batch.
        num_documents: n; 0 when there are more ranks than documents.
        batch_documents: B.
    """

    spans: SpanBatch
    start: int
    num_documents: int
    batch_documents: int


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
    """

    loss: float
    contrastive: float
    mlm: float
    grad_norm: float
    lr: float
    num_selected: int
    num_tokens: int
    padding_share: float


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not a finite number; the parameters are those of the step before."""


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
        microbatch_tokens: most tokens in one forward; None: the whole share at once.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' own.
    """

    encoder: Encoder
    objective: Declutr
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    world: World
    seed: int
    total_steps: int
    microbatch_tokens: int | None = None
    autocast: torch.dtype | None = None

    def step(self, batch: RankBatch, step: int) -> StepMetrics:
        """Runs the 1-based optimizer step `step`.

        Raises:
            NonFiniteLossError: before anything is updated, on every rank alike.
        """
        self.optimizer.zero_grad(set_to_none=True)
        contrastive, mlm_sum, num_selected, embeddings = self.gradients(batch, step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.world.sum_gradients(parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm))
        pieces = batch.spans.microbatches(self.microbatch_tokens)
        places = sum(self.encoder.token_places(piece) for piece in pieces)
        counts = mlm_sum.new_tensor([batch.spans.num_tokens, places], dtype=torch.float64)
        totals = self.world.sum(torch.cat([mlm_sum.double()[None], counts])).tolist()
        mlm = totals[0] / max(1, num_selected)
        loss = float(contrastive) + mlm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {step}: loss {loss} (contrastive {float(contrastive)}, mlm {mlm}), gradient norm {norm}: not "
                f"finite, nothing was updated. Try a smaller optim.lr (now {self.optim.lr}), a larger temperature, or "
                "precision: fp32"
            )
        lr = learning_rate(self.optim, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if embeddings is not None:
            self.objective.remember(embeddings)
        return StepMetrics(
            loss=loss,
            contrastive=float(contrastive),
            mlm=mlm,
            grad_norm=norm,
            lr=lr,
            num_selected=num_selected,
            num_tokens=int(totals[1]),
            padding_share=1 - totals[1] / max(1.0, totals[2]),
        )

    def gradients(self, batch: RankBatch, step: int) -> tuple[Tensor, Tensor, int, Tensor | None]:
        """Accumulates this rank's part of the global gradient in the encoder's parameters.

        One forward when everything fits. Otherwise two passes (GradCache, Gao et al. 2021): embeddings without a graph,
        the loss's gradient with respect to them, then each microbatch again with its graph and the same dropout. The
        result does not depend on how the spans were cut.

        Returns:
            Contrastive loss of the global batch; this rank's MLM loss, summed over its selected tokens; selected
            tokens of all ranks; `(2M, D)` detached embeddings of the global batch, or None when not contrastive.
        """
        pieces = batch.spans.microbatches(self.microbatch_tokens)
        selected = int(self.world.sum(batch.spans.labels.new_tensor([len(batch.spans.labels)]))[0])
        share = 1.0 / max(1, selected)
        if len(pieces) == 1:
            spans, mlm_sum = self._forward(pieces[0], 0, step)
            contrastive, embeddings = self._contrast(spans, batch)
            loss = contrastive + mlm_sum * share
            if loss.requires_grad:  # not on a rank without documents
                loss.backward()
            return contrastive.detach(), mlm_sum.detach(), selected, embeddings
        with torch.no_grad():
            cached = torch.cat([self._forward(p, i, step)[0] for i, p in enumerate(pieces)])
        cached.requires_grad_(True)
        contrastive, embeddings = self._contrast(cached, batch)
        if contrastive.requires_grad:
            contrastive.backward()
        gradient = torch.zeros_like(cached) if cached.grad is None else cached.grad
        mlm_total = cached.new_zeros(())
        for i, (piece, upstream) in enumerate(zip(pieces, gradient.split([p.num_spans for p in pieces]), strict=True)):
            spans, mlm_sum = self._forward(piece, i, step)
            ((spans * upstream).sum() + mlm_sum * share).backward()
            mlm_total += mlm_sum.detach()
        return contrastive.detach(), mlm_total, selected, embeddings

    def _contrast(self, spans: Tensor, batch: RankBatch) -> tuple[Tensor, Tensor | None]:
        if not self.objective.config.contrastive:
            return spans.new_zeros(()), None
        anchors = self.objective.num_anchors
        views = self.objective.represent(spans, batch.num_documents)
        return self.objective.loss(views, batch.start * anchors, batch.batch_documents * anchors, self.world)

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
