"""The step in the layout of DeCLUTR's released code, written from its description: the baseline of `benchmarks.step`.

Anchors are padded to the longest anchor of the batch and positives to the longest positive. Each goes through the whole
masked language model, including the head over the whole vocabulary on every token. MLM's cross entropy is the model's
own, with -100 for unselected tokens. Pooling is the mean over a span's tokens, special ones included. Positives are
averaged after pooling. The contrastive loss is pytorch-metric-learning's NTXentLoss over all pairs.

This version is faster than the original in two points: attention is torch's fused one (the original's, of transformers
3.4, was not), and padding is not timed.
"""

from dataclasses import dataclass

import torch
from pytorch_metric_learning.losses import NTXentLoss
from torch import Tensor
from transformers import PreTrainedModel

from trainer.data.batches import SpanBatch, pad_rows

_IGNORED = -100  # transformers ignores this label


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
