"""The trainer's own step without Ray, as the benchmarks measure it."""

import argparse
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch

from benchmarks import record
from benchmarks.workload import models, texts
from declutr.trainer.data.batches import Collator, RankBatch
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import Objective, implementation_of
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.scd.config import ScdConfig
from declutr.trainer.objectives.scl.config import SclConfig
from declutr.trainer.objectives.simcse.config import SimcseConfig
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.objectives.text_config import TextObjectiveConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

_CPU = torch.device("cpu")
TOTAL_STEPS = 1000  # length of the learning rate's schedule
OBJECTIVES: dict[str, TextObjectiveConfig] = {
    "simcse": SimcseConfig(),
    "scd": ScdConfig(dropout_rates=(0.05, 0.15), decorrelation_weight=0.005, off_diagonal_weight=0.013),
    "scl": SclConfig(max_tokens=128),
}
"""Settings of the papers' BERT runs."""
ROWS = {"simcse": 64, "scd": 64, "scl": 21}
"""Rows of a step: sentences, or premises with a hypothesis of each label."""


@dataclass(frozen=True)
class Workload:
    """Encoder, documents and step of a benchmark; one seed decides weights, documents, spans and masks.

    Attributes:
        size: one of `models.SIZES`.
        attention_dropout: probability of dropping attention weights; None: the same as `dropout`.
        autocast: type of the matrix products, or None.
    """

    size: str
    spans: SpanConfig
    seed: int
    objective: ObjectiveConfig = field(default_factory=DeclutrConfig)
    dropout: float = 0.0
    attention_dropout: float | None = None
    pooling: Literal["mean", "cls"] = "mean"
    device: torch.device = _CPU
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, device: str = "cpu", precision: str | None = None, **others: Any) -> Self:
        """Make a workload of a benchmark's options `model`, `spans` and `seed`."""
        spans = SpanConfig(min_tokens=options.spans[0], max_tokens=options.spans[1])
        autocast = record.autocast_type(precision, device)
        return cls(options.model, spans, options.seed, device=torch.device(device), autocast=autocast, **others)

    def loss(self, embedding_size: int) -> Objective[Any]:
        """Build the objective, with weights drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made = implementation_of(self.objective)(self.objective, RunContext(self.seed, self.spans), embedding_size)
        return made.to(self.device).train()

    def collator(self) -> Collator:
        """Build the collator; a span leaves room for its two special tokens."""
        return self.loss(1).collator(models.vocabulary(self.size), models.POSITIONS - 4)

    def rows(self, first: int, count: int) -> pa.Table:
        """Rows [first, first + count) of the shards."""
        return texts.documents(first, count, self.spans, models.vocabulary(self.size).size, self.seed)

    def batch(self, first: int, count: int) -> RankBatch:
        """Build one worker's batch of a step from rows [first, first + count)."""
        return self.collator().collate(self.rows(first, count), np.zeros(count, np.int64)).to(self.device)

    def encoder(self) -> Encoder:
        """Build the trainer's encoder: packed, in training mode, float32."""
        made = models.encoder(self.size, self.dropout, self.seed, self.attention_dropout, self.pooling)
        return made.to(self.device)

    def train_step(
        self,
        encoder: Encoder,
        microbatch_tokens: int | None = None,
        comm: Communicator | None = None,
        late: bool = False,
    ) -> TrainStep:
        """Build a train step with the trainer's default optimizer, for one worker by default."""
        optim = OptimConfig()
        loss = self.loss(encoder.embedding_size)
        task = TrainTask(
            encoder=encoder,
            objective=loss,
            comm=comm or Communicator(),
            seed=self.seed,
            microbatch=Microbatch(microbatch_tokens),
            autocast=self.autocast,
        )
        optimizer = build_optimizer(optim, encoder, loss, fused=late or None)
        return TrainStep(tasks=(task,), optimizer=optimizer, optim=optim, total_steps=TOTAL_STEPS, late=late)


@dataclass(frozen=True)
class TextWorkload(Workload):
    """Encoder, rows of short texts, and step of a text objective; `spans` has no effect."""

    def rows(self, first: int, count: int) -> pa.Table:
        """Rows [first, first + count) of sentences, or of premises with their hypotheses."""
        pairs = "sentences" not in self.objective.reads
        return texts.text_rows(first, count, pairs, models.vocabulary(self.size).size, self.seed)
