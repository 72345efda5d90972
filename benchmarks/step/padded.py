"""The padded steps that `benchmarks.step` compares with: DeCLUTR's released layout, and sentence-transformers'.

The released layout is written from its description. Anchors are padded to the longest anchor of the batch and positives
to the longest positive. Each goes through the whole masked language model, including the head over the whole vocabulary
on every token. MLM's cross entropy is the model's own, with -100 for unselected tokens. Pooling is the mean over a
span's tokens, special ones included. Positives are averaged after pooling. The contrastive loss is
pytorch-metric-learning's NTXentLoss over all pairs.

This version is faster than the original in two points: attention is torch's fused one (the original's, of transformers
3.4, was not), and padding is not timed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor, nn
from transformers import PreTrainedModel

from declutr.trainer.data.batches import SpanBatch, pad_rows

_IGNORED = -100  # transformers ignores this label
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_MINI_BATCH = 32  # the default of sentence-transformers


@dataclass(frozen=True)
class PaddedSpans:
    """Spans of one kind, `(S, longest)`: ids, real tokens, labels."""

    ids: Tensor
    mask: Tensor
    labels: Tensor


@dataclass(frozen=True)
class PaddedBatch:
    """A step's anchors and positives, each kind padded to its longest span."""

    anchors: PaddedSpans
    positives: PaddedSpans

    @property
    def num_places(self) -> int:
        """Token places, including padding."""
        return self.anchors.ids.numel() + self.positives.ids.numel()


def pad_batch(batch: SpanBatch, num_anchors: int, pad_id: int, device: torch.device) -> PaddedBatch:
    """Lay out a packed batch, which is on the CPU with its anchors first, like the released collation."""
    parts = [batch.span_slice(0, num_anchors), batch.span_slice(num_anchors, batch.num_spans)]
    return PaddedBatch(*(_pad(part, pad_id, device) for part in parts))


def _pad(batch: SpanBatch, pad_id: int, device: torch.device) -> PaddedSpans:
    ids, mask = pad_rows(batch, pad_id)
    flat = torch.full_like(batch.input_ids, _IGNORED)
    flat[batch.selected] = batch.labels
    labels = torch.full_like(ids, _IGNORED)
    labels[mask] = flat
    return PaddedSpans(ids.to(device), mask.long().to(device), labels.to(device))


@dataclass(frozen=True)
class ReleasedStep:
    """Loss and gradient of a step in the released layout, by a masked language model with transformers' attention."""

    model: PreTrainedModel
    num_positives: int
    temperature: float
    autocast: torch.dtype | None

    def gradients(self, batch: PaddedBatch) -> Tensor:
        """Accumulate the gradient in the model's parameters; return the loss, contrastive + MLM."""
        device = batch.anchors.ids.device
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            anchors, mlm = self._embed(batch.anchors, with_loss=True)
            positives, _ = self._embed(batch.positives, with_loss=False)
        averaged = positives.view(len(anchors), self.num_positives, -1).mean(dim=1)
        labels = torch.arange(len(anchors), device=device).repeat(2)
        embeddings = torch.cat([anchors, averaged])
        if embeddings.dtype != torch.float64:  # the loss needs at least float32
            embeddings = embeddings.float()
        contrastive: Tensor = NTXentLoss(temperature=self.temperature)(embeddings, labels)
        loss = contrastive + mlm
        loss.backward()
        return loss.detach()

    def _embed(self, spans: PaddedSpans, with_loss: bool) -> tuple[Tensor, Tensor]:
        """Mean of each span's last hidden states, and the MLM loss."""
        output = self.model(
            input_ids=spans.ids,
            attention_mask=spans.mask,
            labels=spans.labels if with_loss else None,
            output_hidden_states=True,
        )
        hidden, mask = output.hidden_states[-1], spans.mask[..., None]
        pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return pooled, output.loss if with_loss else pooled.new_zeros(())


class _Hidden(nn.Module):
    """Token embeddings in the form that its pooling reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.base_model

    def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        output = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return features | {"token_embeddings": output.last_hidden_state}


class NeighbourStep:
    """Loss and gradient of a contrastive step by sentence-transformers' CachedMultipleNegativesRankingLoss.

    Its trainer pads like the released collation. The loss encodes each side once without and once with a graph,
    whatever the size of the batch. Its four directions together contrast the same pairs as NT-Xent. Nothing is masked,
    because it has no MLM loss.

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
