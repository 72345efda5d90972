"""The trainer's own step without Ray, as the benchmarks measure it."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from benchmarks import documents, models, record
from trainer.data.batches import RankBatch
from trainer.model.encoder import Encoder
from trainer.objectives.config import RunContext
from trainer.objectives.declutr.config import DeclutrConfig
from trainer.objectives.declutr.feed import SpanFeed
from trainer.objectives.declutr.objective import Declutr
from trainer.objectives.span_settings import SpanConfig
from trainer.parallel.world import World
from trainer.step.microbatch import Microbatch
from trainer.step.optim import build_optimizer
from trainer.step.settings import OptimConfig
from trainer.step.step import Stepper

_CPU = torch.device("cpu")
TOTAL_STEPS = 1000  # length of the learning rate's schedule


@dataclass(frozen=True)
class Workload:
    """Encoder, documents and step of a benchmark; one seed decides weights, documents, spans and masks.

    Attributes:
        size: one of `models.SIZES`.
        autocast: type of the matrix products, or None.
    """

    size: str
    spans: SpanConfig
    seed: int
    objective: DeclutrConfig = field(default_factory=DeclutrConfig)
    dropout: float = 0.0
    device: torch.device = _CPU
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, device: str = "cpu", precision: str | None = None, **others: Any) -> Self:
        """Make a workload of a benchmark's options `model`, `spans` and `seed`."""
        spans = SpanConfig(min_tokens=options.spans[0], max_tokens=options.spans[1])
        autocast = record.autocast_type(precision, device)
        return cls(options.model, spans, options.seed, device=torch.device(device), autocast=autocast, **others)

    def feed(self) -> SpanFeed:
        """Build the feed; a span leaves room for its two special tokens."""
        return SpanFeed(
            spans=self.spans,
            masking=self.objective.masking if self.objective.mlm else None,
            unmasked_anchors=False,
            include_positives=True,
            max_content=models.POSITIONS - 4,
            vocabulary=models.vocabulary(self.size),
            seed=self.seed,
        )

    def batch(self, first: int, count: int) -> RankBatch:
        """Build one worker's batch of a step from documents [first, first + count)."""
        feed = self.feed()
        table = documents.documents(first, count, self.spans, feed.vocabulary.size, self.seed)
        return feed.feed(table, np.zeros(count, np.int64)).to(self.device)

    def encoder(self) -> Encoder:
        """Build the trainer's encoder: packed, in training mode, float32."""
        return models.encoder(self.size, self.dropout, self.seed).to(self.device)

    def stepper(self, encoder: Encoder, microbatch_tokens: int | None = None, world: World | None = None) -> Stepper:
        """Build a stepper with the trainer's default optimizer, for one worker by default."""
        optim = OptimConfig()
        loss = Declutr(self.objective, RunContext(seed=self.seed, spans=self.spans), encoder.embedding_size)
        return Stepper(
            encoder=encoder,
            objective=loss,
            optimizer=build_optimizer(optim, encoder, loss),
            optim=optim,
            world=world or World(),
            seed=self.seed,
            total_steps=TOTAL_STEPS,
            microbatch=Microbatch(microbatch_tokens),
            autocast=self.autocast,
        )
