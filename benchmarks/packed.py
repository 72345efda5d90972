"""The trainer's own step without Ray, as the benchmarks measure it."""

import numpy as np
import pyarrow as pa
import torch

from trainer.data.batches import RankBatch
from trainer.model.encoder import Encoder
from trainer.objectives.declutr.config import DeclutrConfig
from trainer.objectives.declutr.feed import Feed
from trainer.objectives.declutr.objective import Declutr
from trainer.parallel.world import World
from trainer.step.microbatch import Microbatch
from trainer.step.optim import OptimConfig, build_optimizer
from trainer.step.step import Stepper

TOTAL_STEPS = 1000  # length of the learning rate's schedule


def stepper(
    encoder: Encoder,
    feed: Feed,
    objective: DeclutrConfig,
    microbatch_tokens: int | None = None,
    autocast: torch.dtype | None = None,
    world: World | None = None,
) -> Stepper:
    """Build a stepper with the trainer's default optimizer, for one worker by default."""
    optim = OptimConfig()
    return Stepper(
        encoder=encoder,
        objective=Declutr(objective, feed.spans.num_anchors, feed.spans.num_positives),
        optimizer=build_optimizer(optim, encoder),
        optim=optim,
        world=world or World(),
        seed=feed.seed,
        total_steps=TOTAL_STEPS,
        microbatch=Microbatch(microbatch_tokens),
        autocast=autocast,
    )


def rank_batch(feed: Feed, documents: pa.Table, device: torch.device) -> RankBatch:
    """Build the batch of one step for one worker."""
    count = len(documents)
    return RankBatch(feed.batch(documents, np.zeros(count, np.int64)).to(device), 0, count, count)


def loss_and_gradients(made: Stepper, batch: RankBatch) -> torch.Tensor:
    """Accumulate the gradient in the encoder's parameters; return the loss, contrastive + MLM."""
    found = made.gradients(batch, 1)
    return found.contrastive + found.mlm_sum / max(1, found.num_selected)
