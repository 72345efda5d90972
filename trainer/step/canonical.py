"""One rank's part of the gradient when sums must not depend on the number of workers (`scaling.elastic_determinism`).

Each canonical microbatch has a separate forward and backward, and its gradient is a separate term of the sums
(trainer/parallel/fixedpoint.py). The loss is computed from the embeddings of all, whole and the same on every worker.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from declutr.trainer.data.batches import AnyBatch, RankBatch
from declutr.trainer.data.canonical import canonical_microbatches
from declutr.trainer.objectives.row_shard import RowShard
from declutr.trainer.parallel.fixedpoint import FixedPointReducer
from declutr.trainer.step.gradcache import GlobalCounts, GradCache, Gradients, backward

_MLM_STEP = 2.0**-20  # losses are rounded to its multiples: below 2^33, sums of those are exact in float64


@dataclass(frozen=True)
class CanonicalCache(GradCache):
    """Both passes of a step, by canonical microbatches.

    Attributes:
        reducer: sums of the gradients.
        max_tokens: tokens of this rank up to which the graphs of all microbatches are kept; None: no limit. Otherwise
            the second pass computes each again, as it does with activation checkpointing.
        first_canonical: number of this rank's first microbatch in the global batch.
    """

    reducer: FixedPointReducer = field(kw_only=True)
    max_tokens: int | None = None
    first_canonical: int = 0

    def embed(self, pieces: list[AnyBatch]) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece, with their graphs if they fit."""
        tokens = sum(piece.num_tokens for piece in pieces)
        kept = self.max_tokens is None or tokens <= self.max_tokens
        if self.encoder.config.activation_checkpointing:
            kept = len(pieces) == 1  # a recomputation uses the dropout keys of the latest forward
        if not kept and not self.objective.config.embeds:
            return []
        with torch.set_grad_enabled(kept):
            return [self._forward(piece, number) for number, piece in enumerate(pieces)]

    def _differentiate(
        self, batch: RankBatch, pieces: list[AnyBatch], embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts
    ) -> Gradients:
        share = self.weight * self.objective.config.mlm_weight / max(1, counts.selected)
        cached = [(spans.detach(), mlm_sum.detach()) for spans, mlm_sum in embedded]
        kept = embedded if any(each.requires_grad for pair in embedded for each in pair) else []
        # the loss is the same on every rank, so one of them adds the gradient of the objective's parameters
        with self.reducer.ignoring() if self.comm.rank else nullcontext():
            terms, gradient, gathered, spread = self._through_loss(cached, batch, counts)
        upstream = [None] * len(pieces) if gradient is None else gradient.split([piece.num_spans for piece in pieces])
        mlm_total = torch.zeros((), dtype=torch.float64, device=batch.spans.device)
        for number, (piece, gradient_part) in enumerate(zip(pieces, upstream, strict=True)):
            spans, mlm_sum = kept[number] if kept else self._forward(piece, number)
            if kept:
                kept[number] = spans.detach(), mlm_sum.detach()  # releases the graph once this backward is done
            through_spans = 0.0 if gradient_part is None else (spans * gradient_part).sum()
            backward(through_spans + mlm_sum * share)
            mlm_total += (mlm_sum.detach().double() / _MLM_STEP).round() * _MLM_STEP
        return Gradients(terms, mlm_total, counts.selected, gathered, spread)

    def _views(self, spans: Tensor, batch: RankBatch) -> Tensor:
        """Views of the rank's rows, computed for each microbatch alone."""
        microbatches = canonical_microbatches(batch)
        parts = spans.split([microbatch.spans.num_spans for microbatch in microbatches])
        views = torch.cat(
            [self.objective.views(part, microbatch) for part, microbatch in zip(parts, microbatches, strict=True)]
        )
        return views + 0.0  # a gather by sums turns -0 into 0, and one worker gathers nothing

    def _row_shard(self, batch: RankBatch, counts: GlobalCounts) -> RowShard | None:
        """None: sums within shares would depend on the number of workers."""
        del batch, counts
        return None

    def _stream(self, number: int) -> tuple[int, int]:
        """As for one worker that has all microbatches."""
        return 0, self.first_canonical + number
