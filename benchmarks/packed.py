"""The trainer's own step, without its Ray half: what the benchmarks measure."""

import numpy as np
import pyarrow as pa
import torch

from trainer.data.batches import RankBatch
from trainer.model.encoder import Encoder
from trainer.objectives.config import RunContext
from trainer.objectives.declutr.config import DeclutrConfig
from trainer.objectives.declutr.feed import SpanFeed
from trainer.objectives.declutr.objective import Declutr
from trainer.parallel.world import World
from trainer.step.microbatch import Microbatch
from trainer.step.optim import build_optimizer
from trainer.step.settings import OptimConfig
from trainer.step.step import Stepper

TOTAL_STEPS = 1000  # of the learning rate's schedule


def stepper(
    encoder: Encoder,
    feed: SpanFeed,
    objective: DeclutrConfig,
    microbatch_tokens: int | None = None,
    autocast: torch.dtype | None = None,
    world: World | None = None,
) -> Stepper:
    """A stepper with the trainer's default optimizer; of one worker, unless said otherwise."""
    optim = OptimConfig()
    loss = Declutr(objective, RunContext(seed=feed.seed, spans=feed.spans), encoder.embedding_size)
    return Stepper(
        encoder=encoder,
        objective=loss,
        optimizer=build_optimizer(optim, encoder, loss),
        optim=optim,
        world=world or World(),
        seed=feed.seed,
        total_steps=TOTAL_STEPS,
        microbatch=Microbatch(microbatch_tokens),
        autocast=autocast,
    )


def rank_batch(feed: SpanFeed, documents: pa.Table, device: torch.device) -> RankBatch:
    """A step's batch of one worker."""
    return feed.feed(documents, np.zeros(len(documents), np.int64)).to(device)


def loss_and_gradients(made: Stepper, batch: RankBatch) -> torch.Tensor:
    """Accumulates the gradient in the encoder's parameters; returns the loss, contrastive + MLM."""
    found = made.gradients(batch, 1)
    return found.terms.get("contrastive", 0.0) + found.mlm_sum / max(1, found.num_selected)
