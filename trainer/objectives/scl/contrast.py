"""Supervised contrast of premises with hypotheses.

Legend: M pairs of the global batch, A anchors, H embedding size.
"""

import numpy as np
import torch
from torch import Tensor

from declutr.common import seeding
from declutr.pipeline.shards.content import ENTAILMENT
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.scl.config import Most, SclConfig


def contrast(batch: Gathered, config: SclConfig) -> Tensor:
    """Mean over anchors and their positives p of -log(exp(s_p) / sum_k exp(s_k)), s = u . v / t; 0 without an anchor.

    The sum is over the anchor's positives and negatives. An anchor is the premise of an entailment pair. Its positives
    are the hypotheses of all entailment pairs with this premise; its negatives all other hypotheses of the batch.

    Args:
        batch: `(M, 2, H)` views, and the facts `label`, `premise` (key) and `hypothesis` (key).
        config: temperature and numbers of positives and negatives.
    """
    premises, hypotheses = batch.views.unbind(1)
    entailed = batch.facts["label"] == ENTAILMENT
    anchors = entailed.nonzero().squeeze(1)
    if len(anchors) == 0:
        return batch.views.sum() * 0
    scores = premises[anchors] @ hypotheses.T / config.temperature
    same = batch.facts["premise"][anchors, None] == batch.facts["premise"][None]
    positive = same & entailed
    negative = ~positive
    if (config.positives, config.negatives) != ("all", "all"):
        drawn = _priorities(batch, anchors)
        positive = _most(positive, config.positives, drawn.scatter(1, anchors[:, None], -1))  # its own is always one
        negative = _most(negative, config.negatives, drawn)
    log_sums = scores.masked_fill(~(positive | negative), -torch.inf).logsumexp(dim=1)
    terms = (log_sums[:, None] - scores).masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1)
    return terms.mean()


def _most(candidates: Tensor, most: Most, priorities: Tensor) -> Tensor:
    """The candidates with the lowest priorities of each row, at most `most`; `(A, M)` booleans."""
    if most == "all" or most >= candidates.shape[1]:
        return candidates
    kept = priorities.masked_fill(~candidates, torch.iinfo(priorities.dtype).max).topk(most, dim=1, largest=False)
    return candidates & torch.zeros_like(candidates).scatter(1, kept.indices, True)


def _priorities(batch: Gathered, anchors: Tensor) -> Tensor:
    """`(A, M)` random int64 from 0 that depend on the step and the keys of anchor and hypothesis alone."""
    keys = batch.facts["hypothesis"].cpu().numpy().view(np.uint64)
    steps = np.full(len(keys), batch.step, np.uint64)
    drawn = seeding.blocks(batch.seed, "scl", keys, steps, np.zeros_like(steps)).astype(np.int64)
    words = torch.from_numpy(drawn).to(anchors.device)
    mixed = words[anchors, 0, None] ^ words[None, :, 1]
    for multiplier in (0x7FEB352D, 0x846CA68B):
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
