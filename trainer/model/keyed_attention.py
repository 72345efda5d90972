"""Attention with dropout keyed by token: explicit weights, and the attention of the padded layout.

Dropout in fused kernels cannot be repeated in another microbatch, so weights are computed where some are dropped. On a
GPU only those of a few spans exist at a time: the backward computes them again, and their masks from the keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from declutr.trainer.data.tokenrates import TokenRates
from declutr.trainer.model.dropout import NEVER, DropoutKeys, WeightDropout

_WEIGHTS = 2**26  # largest number of weights that exist at a time on a GPU, 256 MiB in float32


def padded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention over padded spans in transformers' interface, with dropout keyed by token.

    Args:
        module: the attention layer, of a model that `prepare_modules` has prepared.
        query: `(S, heads, longest, head_dim)`.
        key: keys; it may have fewer heads.
        value: values of the same shape as the keys.
        attention_mask: boolean, True where a key may be attended to, or numbers that are added to the scores.
        scaling: factor of the scores; None means 1 / sqrt(head_dim).
        dropout: probability of dropping an attention weight.
        kwargs: arguments of torch's attention.
    """
    batch = module.declutr_keys
    assert isinstance(batch, DropoutKeys)
    if drop := weight_dropout(module, dropout, batch.tokens, batch.attention):
        shared = query.shape[1] // key.shape[1]  # query heads that share a key head
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        attend = attend_in_parts if query.is_cuda else attend_with_dropout
        attended = attend(query, key, value, attention_mask, scaling, drop)
        return attended.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs
    )
    return output


def weight_dropout(
    module: torch.nn.Module, dropout: float, keys: Tensor | None, rates: TokenRates | None
) -> WeightDropout | None:
    """The dropout of an attention layer's weights; None if none is dropped.

    Args:
        module: the attention layer, of a model that `prepare_modules` has prepared.
        dropout: the layer's own probability, which may be 0 where the batch has rates.
        keys: keys of the query tokens.
        rates: rates of the query tokens, instead of the layer's own.

    Raises:
        RuntimeError: the batch has no `SpanBatch.keys`, which training needs.
    """
    drops = dropout > NEVER if rates is None else module.training and rates.any
    if not drops:
        return None
    if keys is None:
        raise RuntimeError("attention dropout needs the keys of its tokens: SpanBatch.keys is missing")
    number = module.declutr_number
    assert isinstance(number, Tensor)
    return WeightDropout(number, dropout, keys, rates)


def attend_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, drop: WeightDropout
) -> Tensor:
    """Computes attention with explicit weights; `attend_in_parts` has the arguments."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None and mask.dtype == torch.bool:
        # not -inf: a position beyond its span may attend to no key, and its NaN would spread to every gradient
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=scores.dtype if scores.dtype == torch.float64 else torch.float32)
    return drop.apply(weights).to(value.dtype) @ value


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    drop: WeightDropout,
    most_weights: int = _WEIGHTS,
) -> Tensor:
    """As `attend_with_dropout`, some spans at a time; the backward computes the weights of each part again.

    Args:
        query: `(spans, heads, longest, head_dim)`.
        key: keys of the same shape.
        value: values of the same shape.
        mask: boolean or numbers, which broadcast to the weights; None: every key may be attended to.
        scaling: factor of the scores; None means 1 / sqrt(head_dim).
        drop: dropout of the weights, with keys `(spans, longest)`.
        most_weights: largest number of weights that exist at a time; a span is never cut.
    """
    spans, heads, longest = query.shape[:3]
    size = max(1, most_weights // max(1, heads * longest * longest))
    parts = []
    for start in range(0, spans, size):
        part = slice(start, start + size)
        parts.append(
            checkpoint(
                attend_with_dropout,
                query[part],
                key[part],
                value[part],
                mask if mask is None or mask.ndim < 4 or len(mask) == 1 else mask[part],
                scaling,
                drop.rearranged(lambda tensor, part=part: tensor[part]),  # type: ignore[misc]
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(parts)
