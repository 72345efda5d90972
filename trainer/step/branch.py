"""A branch of a run: an objective on the encoder, with everything that computes its gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.data.batches import AnyBatch, RankBatch
from trainer.data.canonical import units_of
from trainer.model.encoder import Encoder
from trainer.model.frontend import Frontend
from trainer.objectives.base import Objective
from trainer.objectives.share import SHARED_ROWS
from trainer.parallel.fixedpoint import FixedPointSums
from trainer.parallel.overlap import OverlappedSums
from trainer.parallel.world import World
from trainer.step.canonical import CanonicalCache
from trainer.step.gradcache import GradCache, Gradients
from trainer.step.microbatch import Microbatch, out_of_memory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Computes this rank's part of the gradient of one objective.

    Attributes:
        encoder: the model, in training mode.
        objective: the loss on the views of the global batch.
        world: the workers.
        seed: the branch's seed, for dropout.
        microbatch: limit of the tokens in one forward.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' type.
        name: name among the run's additional branches; empty for the main one.
        frontend: hidden states of patches; None for spans of tokens.
        weight: factor of the loss.
        shared_rows: views of the global batch above which each worker computes a share of the loss.
        overlap: sums of the encoder's gradients that start during the branch's last backward, which is the last of the
            update; None: they are summed after it.
        sums: sums of gradients that do not depend on the number of workers; None: ordinary ones.
    """

    encoder: Encoder
    objective: Objective[Any]
    world: World
    seed: int
    microbatch: Microbatch = field(default_factory=Microbatch)
    autocast: torch.dtype | None = None
    name: str = ""
    frontend: Frontend | None = None
    weight: float = 1.0
    shared_rows: int = SHARED_ROWS
    overlap: OverlappedSums | None = None
    sums: FixedPointSums | None = None

    @property
    def label(self) -> str:
        """Prefix of the branch's metrics: `NAME_`, empty for the main branch."""
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
        counts = passes.count(batch)
        embedded = self._all_fit(lambda: passes.embed(pieces))
        if embedded is None:
            return None
        return self._all_fit(lambda: passes.differentiate(batch, pieces, embedded, counts), sends=True)

    def cut(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share: canonical ones if the bits must not depend on the number of workers."""
        if self.sums is not None:
            return [unit.spans for unit in units_of(batch)]
        return self.microbatch.cut(batch.spans)

    def _passes(self, batch: RankBatch, step: int) -> GradCache:
        """Both passes of a step."""
        given = self.encoder, self.objective, self.world, self.seed, step, self.autocast, self.frontend, self.weight
        if self.sums is None:
            return GradCache(*given, self.shared_rows, *([] if self.overlap is None else [self.overlap.arm]))
        first = batch.units[0].number if batch.units else 0
        limit = self.microbatch.max_tokens
        return CanonicalCache(*given, sums=self.sums, max_tokens=limit, first_unit=first)

    def _pieces(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share. With a sharded encoder, all ranks get the same number; the last may be empty."""
        pieces, spans = self.cut(batch), batch.spans
        if not self.encoder.sharded:
            return pieces
        return pieces + [spans.span_slice(0, 0)] * (self.world.largest(len(pieces)) - len(pieces))

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
        return None if self.world.largest(int(result is None)) else result
