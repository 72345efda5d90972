"""One rank's part of the gradient of the global batch's loss: one forward or, where it does not fit, two passes.

The two passes are GradCache's (Gao et al. 2021): embeddings without a graph, then, under the gradient of the loss with
respect to them, each piece again with its graph and the same dropout.

Legend: M anchors of the global batch, D embedding size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common import seeding
from trainer.data.batches import RankBatch, SpanBatch
from trainer.model.encoder import Encoder
from trainer.objectives.declutr.objective import Declutr
from trainer.parallel.world import World


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
class GradCache:
    """What both passes need.

    Attributes:
        encoder: the model, in training mode.
        objective: the contrastive half of the loss.
        world: the workers.
        seed: the run's seed, for dropout.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' own.
    """

    encoder: Encoder
    objective: Declutr
    world: World
    seed: int
    autocast: torch.dtype | None = None

    def count(self, spans: SpanBatch) -> Counts:
        """What all ranks know after one sum."""
        own = [0] * self.world.size
        if self.objective.config.contrastive:
            own[self.world.rank] = self.objective.anchors_in(spans.num_spans)
        selected, *anchors = self.world.sum(spans.labels.new_tensor([len(spans.labels), *own])).tolist()
        return Counts(selected, sum(anchors[: self.world.rank]), sum(anchors))

    def embed(self, pieces: list[SpanBatch], step: int) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece: with their graph when there is one piece, else without."""
        if len(pieces) > 1 and not self.objective.config.contrastive:
            return []  # nothing crosses pieces, one pass is enough
        with torch.set_grad_enabled(len(pieces) == 1):
            return [self._forward(piece, number, step) for number, piece in enumerate(pieces)]

    def differentiate(
        self,
        batch: RankBatch,
        pieces: list[SpanBatch],
        embedded: list[tuple[Tensor, Tensor]],
        counts: Counts,
        step: int,
    ) -> Gradients:
        """After `embed`, all the rest: accumulates this rank's part of the gradient in the encoder's parameters."""
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

    def _contrast(self, spans: Tensor, batch: RankBatch, counts: Counts) -> tuple[Tensor, Tensor | None]:
        if not self.objective.config.contrastive:
            return spans.new_zeros(()), None
        views = self.objective.represent(spans, batch.num_documents)
        loss, embeddings = self.objective.loss(views, counts.first_anchor, counts.num_anchors, self.world)
        return loss, embeddings if self.objective.config.queue_size else None

    def _forward(self, piece: SpanBatch, number: int, step: int) -> tuple[Tensor, Tensor]:
        """Embeddings and MLM loss of a microbatch.

        Dropout is keyed by token (trainer/model/dropout.py). Only the padded layout's attention dropout is torch's
        own; it is keyed by (seed, step, rank, microbatch) here, so that the second pass repeats the first.
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
