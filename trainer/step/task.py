"""A training task of a run: an objective on the encoder, with everything that computes its gradient.

One rank's part of the gradient when sums must not depend on the number of workers (`scaling.elastic_determinism`).

Each canonical microbatch has a separate forward and backward, and its gradient is a separate term of the sums
(trainer/parallel/fixedpoint.py). The loss is computed from the embeddings of all, whole and the same on every worker.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from declutr.trainer.data.batches import AnyBatch, RankBatch
from declutr.trainer.data.canonical import canonical_microbatches
from declutr.trainer.data.packedbatch import to_device
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.flops import step_flops
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.base import Objective
from declutr.trainer.objectives.row_shard import SHARED_ROWS, RowShard
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.fixedpoint import FixedPointReducer
from declutr.trainer.parallel.overlap import BucketedReducer
from declutr.trainer.parallel.request import Agreement, Request
from declutr.trainer.step.gradcache import GlobalCounts, GradCache, Gradients, backward
from declutr.trainer.step.microbatch import Microbatch, out_of_memory

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
        kept = embedded if any(tensor.requires_grad for pair in embedded for tensor in pair) else []
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


NUM_COUNTS = 5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Computes this rank's part of the gradient of one objective.

    Attributes:
        encoder: the model, in training mode.
        objective: the loss on the views of the global batch.
        comm: the workers.
        seed: the task's seed, for dropout.
        microbatch: limit of the tokens in one forward.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' type.
        name: name among the run's auxiliary tasks; empty for the main one.
        frontend: hidden states of patches; None for spans of tokens.
        weight: factor of the loss.
        shared_rows: views of the global batch above which each worker computes a share of the loss.
        overlap: sums of the encoder's gradients that start during the task's last backward, which is the last of the
            update; None: they are summed after it.
        reducer: sums of gradients that do not depend on the number of workers; None: ordinary ones.
    """

    encoder: Encoder
    objective: Objective[Any]
    comm: Communicator
    seed: int
    microbatch: Microbatch = field(default_factory=Microbatch)
    autocast: torch.dtype | None = None
    name: str = ""
    frontend: Frontend | None = None
    weight: float = 1.0
    shared_rows: int = SHARED_ROWS
    overlap: BucketedReducer | None = None
    reducer: FixedPointReducer | None = None

    @property
    def label(self) -> str:
        """Prefix of the task's metrics: `NAME_`, empty for the main task."""
        return f"{self.name}_" if self.name else ""

    def buffers(self) -> list[Tensor]:
        """Copies of the objective's buffers, for example the statistics of a BatchNorm."""
        return [buffer.clone() for buffer in self.objective.buffers()]

    def restore(self, buffers: list[Tensor]) -> None:
        """Restores the objective's buffers to their values before a step that failed."""
        with torch.no_grad():
            for buffer, before in zip(self.objective.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def attempt(self, batch: RankBatch, step: int, agreement: Agreement | None = None) -> Gradients | None:
        """Accumulates this rank's part of the global gradient; None on every rank if one rank ran out of memory.

        The result does not depend on how the spans are cut (trainer/step/gradcache.py), so a step that ran out of
        memory is repeated with smaller pieces.

        Ranks agree before and after the all-gather of embeddings, so that none waits there for a rank that failed. The
        first of these two exchanges counts the batch too; the second one carries the requests of `agreement`.
        """
        passes = self._passes(batch, step)
        pieces = self._pieces(batch)
        embedded = self._tried(lambda: passes.embed(pieces))
        counts = passes.count(batch, failed=embedded is None)
        if embedded is None or counts is None:
            return None
        result = self._tried(lambda: passes.differentiate(batch, pieces, embedded, counts))
        if self.microbatch.automatic and self.overlap is not None:
            self.overlap.flush()  # a rank that failed sends the rest too, so that all enter the same exchanges
        return result if self._all_fit(result is not None, agreement) else None

    def totals(self, batch: RankBatch, gradients: Gradients) -> Tensor:
        """`(5 + n,)` float64: MLM sum, tokens, token places, FLOPs and digest of all ranks, and n terms of the loss."""
        spans, encoder, mlm_sum = batch.spans, self.encoder, gradients.mlm_sum.double()[None]
        places = sum(encoder.token_places(piece) for piece in self.cut(batch))
        flops = step_flops(encoder.model, encoder.num_linear_weights, spans.lengths, len(spans.labels))
        counts = torch.tensor([spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.comm.all_reduce_sum(torch.cat([mlm_sum, to_device(counts, mlm_sum.device)]))
        return torch.cat([totals, *(value.detach().double().view(1) for value in gradients.terms.values())])

    def losses(self, gradients: Gradients, totals: list[float]) -> tuple[float, dict[str, float]]:
        """The weighted loss, and its terms by their names in the metrics, of `totals` that were read."""
        config, (mlm_sum, *numbers) = self.objective.config, totals
        values = dict(zip(gradients.terms, numbers[NUM_COUNTS - 1 :], strict=True))
        values["mlm"] = mlm_sum / max(1, gradients.num_selected)
        values = {name: values.get(name, 0.0) for name in config.metrics}
        loss = sum({"mlm": config.mlm_weight}.get(name, 1.0) * value for name, value in values.items())
        return self.weight * loss, {f"{self.label}{name}": value for name, value in values.items()}

    def cut(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share: canonical ones if the bits must not depend on the number of workers."""
        if self.reducer is not None:
            return [microbatch.spans for microbatch in canonical_microbatches(batch)]
        return self.microbatch.cut(batch.spans)

    def _passes(self, batch: RankBatch, step: int) -> GradCache:
        """Both passes of a step."""
        arguments = self.encoder, self.objective, self.comm, self.seed, step, self.autocast, self.frontend, self.weight
        if self.reducer is None:
            return GradCache(*arguments, self.shared_rows, *([] if self.overlap is None else [self.overlap.arm]))
        first = batch.canonical[0].number if batch.canonical else 0
        limit = self.microbatch.max_tokens
        return CanonicalCache(*arguments, reducer=self.reducer, max_tokens=limit, first_canonical=first)

    def _pieces(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share. With a sharded encoder, all ranks get the same number; the last may be empty."""
        pieces, spans = self.cut(batch), batch.spans
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.comm.all_reduce_max(len(pieces)) - len(pieces))

    def _tried(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it ran out of memory and the microbatch is automatic."""
        try:
            return work()
        except RuntimeError as error:
            if not self.microbatch.automatic or not out_of_memory(error):
                raise
        return None

    def _all_fit(self, fitted: bool, agreement: Agreement | None) -> bool:
        """True if no rank ran out of memory; then the requests are agreed too."""
        agreement = None if self.comm.size == 1 else agreement
        if agreement is None and not self.microbatch.automatic:
            return True
        requests = Request(0) if agreement is None else agreement.requests()
        agreed = self.comm.all_reduce_or(requests if fitted else requests | Request.MEMORY)
        if agreement is not None:
            agreement.agreed = agreed
        return Request.MEMORY not in agreed
