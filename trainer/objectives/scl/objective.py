"""SCL: classifies premise and hypothesis, and contrasts premises with hypotheses.

Legend: n rows of the shards on this worker, M pairs of the global batch, A anchors, H embedding size.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from declutr.pipeline.shards.content import LABELS
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.scl.config import SclConfig
from declutr.trainer.objectives.scl.contrast import contrast
from declutr.trainer.objectives.text_objective import TextObjective
from declutr.trainer.objectives.text_packing import TextPacker, Texts, premise_keys, text_keys


@dataclass(frozen=True)
class SclCollator:
    """Packs every text once; a pair's views are the spans of its premise and its hypothesis.

    Attributes:
        packer: packs texts.
    """

    packer: TextPacker

    def collate(self, rows: pa.Table, epochs: NDArray[np.int64]) -> RankBatch:
        """The spans of n premises with their hypotheses, and the label and keys of each pair."""
        texts = Texts(rows)
        every = np.arange(len(texts.rows))
        premises = texts.first[texts.rows]
        spans = self.packer.pack(texts, every, every - premises, epochs)
        hypotheses = np.flatnonzero(every != premises)
        facts = {
            "label": texts.labels[hypotheses],
            "premise": premise_keys(texts)[texts.rows[hypotheses]],
            "hypothesis": text_keys(texts, hypotheses),
        }
        return RankBatch(
            spans,
            len(rows),
            len(hypotheses),
            {name: torch.from_numpy(values) for name, values in facts.items()},
            views=torch.from_numpy(np.stack([premises[hypotheses], hypotheses], axis=1)),
        )


class Scl(TextObjective[SclConfig]):
    """Cross entropy and supervised contrast over `(M, 2, H)` views: premise u and hypothesis v of each pair."""

    def __init__(self, config: SclConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.classifier = nn.Sequential(
            nn.Linear(3 * embedding_size, 3 * embedding_size // 2),
            nn.Linear(3 * embedding_size // 2, len(LABELS)),
        )

    def collator(self, vocabulary: Vocabulary, max_content: int) -> SclCollator:
        """Builds the collator that packs premises and hypotheses."""
        return SclCollator(self.packer(vocabulary, max_content))

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
