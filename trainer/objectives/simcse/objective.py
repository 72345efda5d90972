"""SimCSE: a sentence must find its second view, or its entailed hypothesis, in the global batch.

Legend: n rows on this worker, M rows of the global batch, V views of a row, D embedding size.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from declutr.pipeline.shards.content import CONTRADICTION, ENTAILMENT
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.behind import Dense
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.simcse.config import SimcseConfig
from declutr.trainer.objectives.simcse.infonce import infonce
from declutr.trainer.objectives.text_objective import TextObjective
from declutr.trainer.objectives.text_packing import TextPacker, Texts, draw_labelled

_MASKED = 9
"""Number of the first masked copy among the spans of its row."""


@dataclass(frozen=True)
class SimcseCollator:
    """Packs the views of each row one after the other, and behind them all masked copies.

    Attributes:
        packer: packs texts.
        config: settings of the objective.
    """

    packer: TextPacker
    config: SimcseConfig

    def collate(self, rows: pa.Table, epochs: NDArray[np.int64]) -> RankBatch:
        """The spans of n rows."""
        texts = Texts(rows)
        if self.config.supervised:
            hypotheses = [
                draw_labelled(texts, label, self.packer.seed, epochs) for label in (ENTAILMENT, CONTRADICTION)
            ]
            views = np.stack([texts.first, *hypotheses], axis=1)
        else:
            views = np.stack([texts.first, texts.first], axis=1)
        chosen = views.reshape(-1)
        own = np.zeros(views.shape[1], np.int64) if self.config.equal_views else np.arange(views.shape[1])
        numbers = np.tile(own, len(rows))
        places = torch.arange(len(chosen)).view(views.shape)
        masking = None
        if self.config.mlm:
            masking = self.config.masking, slice(len(chosen), None)
            copied = views if self.config.mlm_copies == "all" else views[:, :1]
            chosen = np.concatenate([chosen, copied.reshape(-1)])
            numbers = np.concatenate([numbers, _MASKED + np.tile(np.arange(copied.shape[1]), len(rows))])
        spans = self.packer.pack(texts, chosen, numbers, epochs, masking=masking)
        return RankBatch(spans, len(rows), len(rows), views=places)


class Simcse(TextObjective[SimcseConfig]):
    """The cross entropy over `(M, 2, D)` views, or `(M, 3, D)` with hard negatives."""

    shards_rows = True
    cuts_exported = True

    def __init__(self, config: SimcseConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.num_views = 3 if config.supervised else 2
        self.head: nn.Module = nn.Identity()
        if config.head:
            self.head = nn.Sequential(nn.Linear(embedding_size, embedding_size), nn.Tanh())

    def collator(self, vocabulary: Vocabulary, max_content: int) -> SimcseCollator:
        """Builds the collator that packs views and masked copies."""
        return SimcseCollator(self.packer(vocabulary, max_content), self.config)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """SimCSE eq. 1; with hard negatives eq. 5, whose weight is added to the logit of a row's own negative."""
        embeddings = self.head(batch.views)
        first, *rest = (batch.cut(embeddings) if self.exported() else embeddings).unbind(1)
        weight = self.config.hard_negative_weight
        return {
            "contrastive": infonce(first, torch.cat(rest), self.config.temperature, weight, row_shard=batch.row_shard)
        }

    def exported(self) -> list[Dense]:
        """The head, if the run is supervised; SimCSE drops it after unsupervised training."""
        if not (self.config.supervised and isinstance(self.head, nn.Sequential)):
            return []
        linear, activation = self.head
        assert isinstance(linear, nn.Linear)
        return [Dense(linear, activation)]
