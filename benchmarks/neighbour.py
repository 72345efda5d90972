"""The step of sentence-transformers' trainer: CachedMultipleNegativesRankingLoss on the same spans.

Anchors and positives are padded to the longest of their column, as in its collation. Its loss encodes each once without
and once with a graph, whatever the size of the batch. Its four directions together contrast the same pairs as NT-Xent.
Tokenisation and collation are not timed. Nothing is masked, because it has no MLM loss.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.released import PaddedBatch, PaddedSpans

_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_MINI_BATCH = 32  # its default


class _Hidden(nn.Module):
    """Token embeddings in the form that its pooling reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.base_model

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        output = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": output.last_hidden_state}


class NeighbourStep:
    """Loss and gradient of a contrastive step by sentence-transformers.

    Raises:
        ImportError: sentence-transformers is not installed.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, autocast: torch.dtype | None) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
        from sentence_transformers.models import Pooling

        self.model = model
        self.autocast = autocast
        size = int(model.config.hidden_size)
        whole = SentenceTransformer(modules=[_Hidden(model), Pooling(size)], device=str(model.device))
        self.loss = CachedMultipleNegativesRankingLoss(
            whole, scale=1 / temperature, mini_batch_size=_MINI_BATCH, directions=_DIRECTIONS
        )

    def gradients(self, batch: PaddedBatch) -> Tensor:
        """Accumulate the gradient in the model's parameters; return the loss."""
        features = [_features(batch.anchors), _features(batch.positives)]
        labels = torch.empty(0, device=batch.anchors.ids.device)
        with torch.autocast(labels.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            loss: Tensor = self.loss(features, labels)
        loss.backward()
        return loss.detach()


def _features(spans: PaddedSpans) -> dict[str, Tensor]:
    return {"input_ids": spans.ids, "attention_mask": spans.mask}
