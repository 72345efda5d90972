"""A training task of a run: an objective on the encoder, with everything that computes its gradient."""

from collections.abc import Callable
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
from declutr.trainer.objectives.row_shard import SHARED_ROWS
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.fixedpoint import FixedPointReducer
from declutr.trainer.parallel.overlap import BucketedReducer
from declutr.trainer.step.canonical import CanonicalCache
from declutr.trainer.step.gradcache import GradCache, Gradients
from declutr.trainer.step.microbatch import Microbatch, out_of_memory

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

    def attempt(self, batch: RankBatch, step: int) -> Gradients | None:
        """Accumulates this rank's part of the global gradient; None on every rank if one rank ran out of memory.

        The result does not depend on how the spans are cut (trainer/step/gradcache.py), so a step that ran out of
        memory is repeated with smaller pieces.

        Ranks agree before and after the all-gather of embeddings, so that none waits there for a rank that failed.
        """
        passes = self._passes(batch, step)
        pieces = self._pieces(batch)
        embedded = self._all_fit(lambda: passes.embed(pieces))
        if embedded is None:
            return None
        counts = passes.count(batch)  # waits for the other hosts while the GPU computes the embeddings
        return self._all_fit(lambda: passes.differentiate(batch, pieces, embedded, counts), sends=True)

    def totals(self, batch: RankBatch, found: Gradients) -> Tensor:
        """`(5 + n,)` float64: MLM sum, tokens, token places, FLOPs and digest of all ranks, and n terms of the loss."""
        spans, encoder, mlm_sum = batch.spans, self.encoder, found.mlm_sum.double()[None]
        places = sum(encoder.token_places(piece) for piece in self.cut(batch))
        flops = step_flops(encoder.model, encoder.num_linear_weights, spans.lengths, len(spans.labels))
        counts = torch.tensor([spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.comm.all_reduce_sum(torch.cat([mlm_sum, to_device(counts, mlm_sum.device)]))
        return torch.cat([totals, *(value.detach().double().view(1) for value in found.terms.values())])

    def losses(self, found: Gradients, totals: list[float]) -> tuple[float, dict[str, float]]:
        """The weighted loss, and its terms by their names in the metrics, of `totals` that were read."""
        config, (mlm_sum, *numbers) = self.objective.config, totals
        values = dict(zip(found.terms, numbers[NUM_COUNTS - 1 :], strict=True))
        values["mlm"] = mlm_sum / max(1, found.num_selected)
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
        given = self.encoder, self.objective, self.comm, self.seed, step, self.autocast, self.frontend, self.weight
        if self.reducer is None:
            return GradCache(*given, self.shared_rows, *([] if self.overlap is None else [self.overlap.arm]))
        first = batch.canonical[0].number if batch.canonical else 0
        limit = self.microbatch.max_tokens
        return CanonicalCache(*given, reducer=self.reducer, max_tokens=limit, first_canonical=first)

    def _pieces(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share. With a sharded encoder, all ranks get the same number; the last may be empty."""
        pieces, spans = self.cut(batch), batch.spans
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.comm.all_reduce_max(len(pieces)) - len(pieces))

    def _all_fit(self, work: Callable[[], T], sends: bool = False) -> T | None:
        """The result of `work`; None on every rank if one ran out of memory and the microbatch is automatic.

        If `work` sends gradients, a rank that failed sends the rest too, so that all enter the same exchanges.
        """
        if not self.microbatch.automatic:
            return work()
        result = None
        try:
            result = work()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        if sends and self.overlap is not None:
            self.overlap.flush()
        return None if self.comm.all_reduce_max(int(result is None)) else result
