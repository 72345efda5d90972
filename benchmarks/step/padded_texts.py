"""The steps of SimCSE, SCD and SCL in the layout of their released code, written from its description.

The texts of a batch are padded to the longest one, specials included. SimCSE and SCD encode 2N rows in one forward, the
two views of a sentence one after the other. SCL encodes the premise and the hypothesis of each pair, so a premise with
three hypotheses is encoded three times. All losses are those of one process.

This version is faster than the originals in two points: attention is torch's fused one where dropout allows it, and
padding is not timed. SCL's pooling is the mean over real tokens, as ours, so that losses can be compared.

Legend: N rows, L longest text of the batch, M pairs, H embedding size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from declutr.trainer.data.batches import RankBatch, pad_rows
from declutr.trainer.objectives.scd.config import ScdConfig
from declutr.trainer.objectives.scl.config import SclConfig
from declutr.trainer.objectives.simcse.config import SimcseConfig

_ALTERNATING = "benchmark_alternating"


@dataclass(frozen=True)
class PaddedTexts:
    """Groups of texts that are encoded in one forward each, and the facts of a row.

    Attributes:
        groups: ids and mask, `(rows, L)` each. SimCSE and SCD have one group of 2N rows, SCL premises and hypotheses.
        facts: `(M,)` labels and keys of SCL's premises.
    """

    groups: list[tuple[Tensor, Tensor]]
    facts: dict[str, Tensor]

    @property
    def num_places(self) -> int:
        """Token places, including padding."""
        return sum(ids.numel() for ids, _ in self.groups)

    @property
    def num_tokens(self) -> int:
        """Tokens, without padding."""
        return sum(int(mask.sum()) for _, mask in self.groups)


def pad_texts(batch: RankBatch, pad_id: int, device: torch.device) -> PaddedTexts:
    """Lay out a packed batch, which is on the CPU."""
    if not batch.facts:
        return PaddedTexts([_to(*pad_rows(batch.tokens, pad_id), device)], {})
    assert batch.views is not None
    ids, mask = pad_rows(batch.tokens, pad_id)
    groups = []
    for view in batch.views.T:  # each view is padded to its own longest text
        longest = int(mask[view].sum(dim=1).max())
        groups.append(_to(ids[view, :longest], mask[view, :longest], device))
    return PaddedTexts(groups, {name: values.to(device) for name, values in batch.facts.items()})


def _to(ids: Tensor, mask: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    return ids.to(device), mask.long().to(device)


@dataclass(frozen=True)
class ReleasedTextStep:
    """Loss and gradient of a step in the released layout.

    Attributes:
        model: masked language model, of which the encoder is used.
        layers: the method's own layers.
        loss: computes the loss from the last hidden states and masks of each group.
        autocast: type of the matrix products, or None.
    """

    model: PreTrainedModel
    layers: nn.Module
    loss: Callable[[list[tuple[Tensor, Tensor]], dict[str, Tensor]], Tensor]
    autocast: torch.dtype | None

    def gradients(self, batch: PaddedTexts) -> Tensor:
        """Accumulate the gradient in the parameters of model and layers; return the loss."""
        device = batch.groups[0][0].device
        encoded = []
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            for ids, mask in batch.groups:
                hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
                encoded.append((hidden if hidden.dtype == torch.float64 else hidden.float(), mask))
        loss = self.loss(encoded, batch.facts)
        loss.backward()
        return loss.detach()


class SimcseLoss(nn.Module):
    """Cross entropy of each first view among all second views, behind a linear layer with tanh (`mlp`)."""

    def __init__(self, config: SimcseConfig, size: int) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.head = nn.Sequential(nn.Linear(size, size), nn.Tanh())

    def forward(self, encoded: list[tuple[Tensor, Tensor]], facts: dict[str, Tensor]) -> Tensor:
        """The loss of `(2N, L, H)` hidden states."""
        del facts
        first, second = _two_views(self.head(encoded[0][0][:, 0]))
        scores = F.cosine_similarity(first[:, None], second[None], dim=-1) / self.temperature
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class ScdLoss(nn.Module):
    """Mean cosine of the two views, and the correlation of their projections."""

    def __init__(self, config: ScdConfig, size: int) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = [nn.Linear(size, config.projector[0])]
        for before, after in zip(config.projector, config.projector[1:], strict=False):
            layers += [nn.BatchNorm1d(before), nn.ReLU(), nn.Linear(before, after, bias=False)]
        self.projector = nn.Sequential(*layers)
        self.normalise = nn.BatchNorm1d(config.projector[-1], affine=False)

    def forward(self, encoded: list[tuple[Tensor, Tensor]], facts: dict[str, Tensor]) -> Tensor:
        """The loss of `(2N, L, H)` hidden states."""
        del facts
        first, second = _two_views(encoded[0][0][:, 0])
        repulsion = F.cosine_similarity(first, second, dim=-1).mean() / self.config.temperature
        left, right = self.normalise(self.projector(first)), self.normalise(self.projector(second))
        correlation = left.T @ right / len(first)
        size = len(correlation)
        on = torch.diagonal(correlation).add(-1).pow(2).sum()
        off = correlation.flatten()[:-1].view(size - 1, size + 1)[:, 1:].pow(2).sum()
        decorrelation = on + self.config.off_diagonal_weight * off
        weighted: Tensor = self.config.repulsion_weight * repulsion + self.config.decorrelation_weight * decorrelation
        return weighted


class SclLoss(nn.Module):
    """Cross entropy on (u, v, |u - v|), and the contrast of each entailed premise with the hypotheses, in a loop."""

    def __init__(self, config: SclConfig, size: int) -> None:
        super().__init__()
        self.config = config
        self.classifier = nn.Sequential(nn.Linear(3 * size, 3 * size // 2), nn.Linear(3 * size // 2, 3))

    def forward(self, encoded: list[tuple[Tensor, Tensor]], facts: dict[str, Tensor]) -> Tensor:
        """The loss of `(M, L, H)` hidden states of premises and of hypotheses."""
        u, v = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for hidden, mask in encoded)
        labels, premises = facts["label"], facts["premise"]
        logits = self.classifier(torch.cat([u, v, (u - v).abs()], dim=-1))
        contrast = []
        for anchor in (labels == 0).nonzero().flatten().tolist():
            scores = u[anchor] @ v.T / self.config.temperature
            positive = (premises == premises[anchor]) & (labels == 0)
            contrast.append(-scores.log_softmax(dim=0)[positive].mean())
        share = self.config.contrastive_weight
        return (1 - share) * F.cross_entropy(logits, labels) + share * torch.stack(contrast).mean()


LOSSES: dict[type, Any] = {SimcseConfig: SimcseLoss, ScdConfig: ScdLoss, SclConfig: SclLoss}


def _two_views(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd ones of 2N rows."""
    return rows[0::2], rows[1::2]


class AlternatingDropout(nn.Module):
    """SCD's dropout: the even rows with one rate, the odd rows with another."""

    def __init__(self, rates: tuple[float, float]) -> None:
        super().__init__()
        self.rates = rates
        self.p = 0.0  # read by the attention layers; `alternating_attention` has its own rates

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states `(2N, ...)` with dropped elements."""
        views = (F.dropout(hidden[view::2], rate, self.training) for view, rate in enumerate(self.rates))
        return torch.stack(list(views), dim=1).flatten(0, 1)


def alternate_dropout(model: PreTrainedModel, rates: tuple[float, float], attention: tuple[float, float]) -> None:
    """Replace the dropout layers of a model by SCD's; attention weights are dropped if a rate of theirs is above 0."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(parent, name, AlternatingDropout(rates))
    if not any(attention):
        return

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        views = []
        for view, rate in enumerate(attention):
            q, k, v = (each[view::2] for each in (query, key, value))
            seen = None if mask is None else mask[view::2]
            dropped = rate if module.training else 0.0
            views.append(F.scaled_dot_product_attention(q, k, v, seen, dropped, scale=given.get("scaling")))
        return torch.stack(views, dim=1).flatten(0, 1).transpose(1, 2), None

    AttentionInterface.register(_ALTERNATING, attend)
    AttentionMaskInterface.register(_ALTERNATING, sdpa_mask)
    model.set_attn_implementation(_ALTERNATING)
