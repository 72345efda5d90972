"""SCL: classifies premise and hypothesis, and contrasts premises with hypotheses.

Legend: n rows of the shards on this worker, M pairs of the global batch, A anchors, H embedding size.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from declutr.common import seeding
from declutr.pipeline.shards.content import ENTAILMENT, LABELS
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.text_config import Limit, SclConfig
from declutr.trainer.objectives.texts import I64, TextCollator, TextObjective, Texts, premise_keys, text_keys


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
        return batch.views.sum() * 0  # a loss with a gradient, where the released code divides by zero
    scores = premises[anchors] @ hypotheses.T / config.temperature  # no cosines, as released
    # equal texts, of whatever row: a file may group a premise twice
    same = batch.facts["premise"][anchors, None] == batch.facts["premise"][None]
    positive = same & entailed  # its neutral and contradicting hypotheses stay negatives
    negative = ~positive
    if (config.positives, config.negatives) != ("all", "all"):
        drawn = _priorities(batch, anchors)
        positive = _lowest(positive, config.positives, drawn.scatter(1, anchors[:, None], -1))  # its own first
        negative = _lowest(negative, config.negatives, drawn)  # the released code ignores the number
    log_sums = scores.masked_fill(~(positive | negative), -torch.inf).logsumexp(dim=1)
    terms = (log_sums[:, None] - scores).masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1)
    return terms.mean()


def _lowest(candidates: Tensor, limit: Limit, priorities: Tensor) -> Tensor:
    """The candidates with the lowest priorities of each row, at most `limit`; `(A, M)` booleans."""
    if limit == "all" or limit >= candidates.shape[1]:
        return candidates
    kept = priorities.masked_fill(~candidates, torch.iinfo(priorities.dtype).max).topk(limit, dim=1, largest=False)
    return candidates & torch.zeros_like(candidates).scatter(1, kept.indices, True)


def _priorities(batch: Gathered, anchors: Tensor) -> Tensor:
    """`(A, M)` random int64 from 0 that depend on the step and the keys of anchor and hypothesis alone."""
    keys = batch.facts["hypothesis"].cpu().numpy().view(np.uint64)
    steps = np.full(len(keys), batch.step, np.uint64)
    drawn = seeding.blocks(batch.seed, "scl", keys, steps, np.zeros_like(steps)).astype(np.int64)
    words = torch.from_numpy(drawn).to(anchors.device)
    mixed = words[anchors, 0, None] ^ words[None, :, 1]
    for multiplier in (0x7FEB352D, 0x846CA68B):  # the mix of trainer/data/packedbatch.py, here in int64
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


class Scl(TextObjective[SclConfig]):
    """Cross entropy and supervised contrast over `(M, 2, H)` views: premise u and hypothesis v of each pair."""

    def __init__(self, config: SclConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.classifier = nn.Sequential(
            # no activation between them, as released
            nn.Linear(3 * embedding_size, 3 * embedding_size // 2),
            nn.Linear(3 * embedding_size // 2, len(LABELS)),
        )

    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """Every text once; a pair's views are the spans of its premise and its hypothesis, its facts label and keys."""
        every = np.arange(len(texts.rows))
        premises = texts.first[texts.rows]
        spans = collator.pack(texts, every, every - premises, epochs)  # a premise of k pairs is encoded once
        hypotheses = np.flatnonzero(every != premises)
        facts = {
            "label": texts.labels[hypotheses],
            "premise": premise_keys(texts)[texts.rows[hypotheses]],
            "hypothesis": text_keys(texts, hypotheses),
        }
        return RankBatch(
            spans,
            len(texts.first),
            len(hypotheses),
            {name: torch.from_numpy(values) for name, values in facts.items()},
            views=torch.from_numpy(np.stack([premises[hypotheses], hypotheses], axis=1)),
        )

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """(1 - lambda) cross entropy on (u, v, |u - v|), and lambda times the contrast of raw dot products."""
        config = self.config
        with torch.autocast(batch.views.device.type, enabled=False):
            premises, hypotheses = batch.views.unbind(1)
            terms = {}
            if config.contrastive_weight < 1:
                features = torch.cat([premises, hypotheses, (premises - hypotheses).abs()], dim=-1)
                cross_entropy = F.cross_entropy(self.classifier(features), batch.facts["label"])
                terms["classification"] = (1 - config.contrastive_weight) * cross_entropy
            if config.contrastive_weight > 0:
                terms["contrastive"] = config.contrastive_weight * contrast(batch, config)
            return terms
