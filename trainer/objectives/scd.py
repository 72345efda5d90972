"""SCD: pushes two dropout views of a sentence apart, and correlates their projections dimension by dimension.

Legend: n rows on this worker, M rows of the global batch, D embedding size, P size of the projections.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from declutr.trainer.data.batches import RankBatch
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.text_config import ScdConfig
from declutr.trainer.objectives.texts import I64, TextCollator, TextObjective, Texts


class Scd(TextObjective[ScdConfig]):
    """Repulsion and decorrelation over `(M, 2, D)` views."""

    def __init__(self, config: ScdConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        layers: list[nn.Module] = []
        width = embedding_size
        for number, size in enumerate(config.projector):
            if number:
                layers += [nn.BatchNorm1d(width), nn.ReLU()]
            layers.append(linear := nn.Linear(width, size, bias=number == 0))  # biases as released
            if config.initializer_range is not None:
                nn.init.normal_(linear.weight, std=config.initializer_range)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            width = size
        self.projector = nn.Sequential(*layers)
        self.normalise = nn.BatchNorm1d(width, affine=False)  # then the products are Pearson correlations

    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """Each sentence twice, with the two pairs of rates."""
        count, config = len(texts.first), self.config
        rates = [config.dropout_rates, config.attention_dropout_rates or config.dropout_rates]
        numbers = np.tile([0, 1], count)  # one key with two rates would nest the masks of the views
        by_view = np.array(rates, np.float64).T  # of hidden states and attention weights
        spans = collator.pack(texts, np.repeat(texts.first, 2), numbers, epochs, by_view[numbers])
        return RankBatch(spans, count, count)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """The two terms (SCD eq. 1 to 4, as the released code computes them)."""
        config = self.config
        with torch.autocast(batch.views.device.type, enabled=False):  # in at least float32, whatever the forward's type
            first, second = batch.views.unbind(1)
            # the released sign: +, which pushes the views apart
            cosine = F.cosine_similarity(first, second, dim=-1).mean()
            # of the global batch; released: local sums / global M
            correlation = self._projected(first).T @ self._projected(second) / len(batch.views)
            own = correlation.diagonal()
            on = (own - 1).square().sum()
            off = correlation.square().sum() - own.square().sum()
            return {
                "repulsion": config.repulsion_weight * cosine / config.temperature,
                "decorrelation": config.decorrelation_weight * (on + config.off_diagonal_weight * off),
            }

    def _projected(self, views: Tensor) -> Tensor:
        """`(M, P)` projections with mean 0 and variance 1 over the global batch, from `(M, D)`."""
        projected: Tensor = self.normalise(self.projector(views))
        return projected
