"""Dropout with masks that depend on tokens, not on batches: equal for any packing, microbatch and world size.

torch's dropout draws from a stream, so a mask depends on all earlier draws. Here a hash of (token key, layer, feature)
decides about an element, and the key comes from (seed, epoch, document, span, position). A second forward of the same
token, in another microbatch or on another worker, drops the same elements.

Dropout in fused kernels of attention cannot be repeated in another microbatch, so weights are computed where some are
dropped. On a GPU only those of a few spans exist at a time: the backward computes them again, and their masks from the
keys. (trainer/model/span_attention.py stores none.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from declutr.common import seeding
from declutr.trainer.data.packedbatch import TokenRates, drops, limit

NEVER = 2.0**-60  # probability of a layer that drops nothing but exists, because some batches have rates for it
_WEIGHTS = 2**26  # largest number of weights that exist at a time on a GPU, 256 MiB in float32


class DropoutKeys:
    """Keys of the tokens in an encoder, shared by all its dropout layers.

    They are kept until the next forward, because activation checkpointing repeats parts of a forward in the backward.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the batch."""
        self.tokens: Tensor | None = None  # int32, with the leading shape of the hidden states
        self.hidden: TokenRates | None = None  # of the tokens' hidden states; None: every layer has its own rate
        self.attention: TokenRates | None = None  # of the tokens' attention weights, as queries


class KeyedDropout(nn.Module):
    """Drops elements of hidden states with probability p in [0, 1) and scales the others by 1 / (1 - p).

    Explicit attention weights `(S, heads, L, L)` of some families are dropped by (query token, head, key position).
    Values without a dimension for spans are left unchanged. `layer` is its number, `width` the most features.
    """

    features: Tensor

    def __init__(self, p: float, layer: int, keys: DropoutKeys, width: int) -> None:
        super().__init__()
        self.p = p
        self.layer = torch.tensor(layer, device="cpu")
        self.keys = keys
        self.register_buffer("features", words(layer, width, torch.device("cpu")), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Drops elements of hidden states `(..., H)`, whose leading shape is the keys', or of attention weights."""
        if not self.training or (self.p == 0 and self.keys.hidden is None):
            return hidden
        keys, rates = self.keys.tokens, self.keys.hidden
        if keys is None:
            raise RuntimeError("dropout needs the keys of its tokens: SpanBatch.keys is missing")
        *rows, length = keys.shape
        if hidden.shape[:-1] != keys.shape:
            if hidden.ndim == 4 and [hidden.shape[0]] == rows and hidden.shape[2:] == (length, length):
                return WeightDropout(self.layer, self.p, keys, self.keys.attention).apply(hidden)
            if hidden.ndim <= keys.ndim:  # of no span, like DeBERTa's embeddings of distances: any mask of the whole
                return hidden  # batch would change with the microbatch
            if list(hidden.shape[:-2]) != rows or hidden.shape[-2] < length:
                return F.dropout(hidden, self.p)  # values that belong to no token; `drops_by_key` finds these families
            missing = (0, hidden.shape[-2] - length)  # Longformer pads its input again
            keys = F.pad(keys, missing)
            rates = None if rates is None else rates.rearranged(lambda tensor: F.pad(tensor, missing))
        mixed = keys[..., None] + self.features[: hidden.shape[-1]]
        if rates is not None:
            return rates.apply(hidden, mixed)
        return hidden.masked_fill(drops(mixed, limit(self.p)), 0.0) * (1 / (1 - self.p))


def words(stream: int, count: int, device: torch.device) -> Tensor:
    """`(count,)` fixed uniform int32 words of a stream, for example one for each feature of a layer."""
    zero = np.zeros(1, np.uint64)
    return torch.from_numpy(seeding.words(stream, "dropout", zero, zero, count)[0].view(np.int32).copy()).to(device)


_TABLES: dict[tuple[int, torch.device], Tensor] = {}


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of spans, by (query token, head, key position)."""

    layer: Tensor  # number of the attention layer, a scalar tensor on the CPU
    p: float  # probability
    keys: Tensor  # int32 keys of the query tokens, `(spans, longest)` or packed `(T,)`
    rates: TokenRates | None = None  # rates of the query tokens, instead of `p`

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> "WeightDropout":
        """The dropout of the same tokens in another shape."""
        rates = None if self.rates is None else self.rates.rearranged(change)
        return WeightDropout(self.layer, self.p, change(self.keys), rates)

    def apply(self, weights: Tensor) -> Tensor:
        """Drops weights `(spans, heads, longest, longest)` and scales the others by 1 / (1 - p)."""
        heads, longest = weights.shape[1], weights.shape[-1]
        words = attention_words(self.layer, heads, longest, self.keys.device)
        mixed = self.keys[:, None, :, None] + words[:, None, :]
        if self.rates is None:
            return weights.masked_fill(drops(mixed, limit(self.p)), 0.0) * (1 / (1 - self.p))
        return self.rates.rearranged(lambda tensor: tensor[:, None]).apply(weights, mixed)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would make a graph for each number, of NumPy's code
def attention_words(layer: Tensor, heads: int, longest: int, device: torch.device) -> Tensor:
    """Cached words of a layer for each head and key position, `(heads, longest)`."""
    number = int(layer)  # on the CPU, so no GPU is waited for
    table = _TABLES.get((number, device))
    if table is None or table.shape[0] < heads or table.shape[1] < longest:
        rows = [words((1 << 32) + number * 4096 + head, max(512, longest), device) for head in range(heads)]
        table = _TABLES[number, device] = torch.stack(rows)
    return table[:heads, :longest]


def key_dropout(
    model: nn.Module,  # changed in place
    keys: DropoutKeys,  # keys of the model's tokens
    width: int,  # largest number of features of its hidden states
) -> None:
    """Replaces every dropout layer of a model by a keyed one, numbered in the model's order."""
    # A list: replaced while it is read.
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    layers = [(parent, name, child) for parent, name, child in children if isinstance(child, nn.Dropout)]
    for number, (parent, name, child) in enumerate(layers):
        setattr(parent, name, KeyedDropout(child.p, number, keys, width))


def padded_attention(
    module: torch.nn.Module,  # the attention layer, of a model that `prepare_modules` has prepared
    query: Tensor,  # `(S, heads, longest, head_dim)`
    key: Tensor,  # keys; it may have fewer heads
    value: Tensor,  # values of the same shape as the keys
    # boolean, True where a key may be attended to, or numbers that are added to the scores.
    attention_mask: Tensor | None,
    scaling: float | None = None,  # factor of the scores; None means 1 / sqrt(head_dim)
    dropout: float = 0.0,  # probability of dropping an attention weight
    **kwargs: Any,  # arguments of torch's attention
) -> tuple[Tensor, Tensor | None]:
    """Computes attention over padded spans in transformers' interface, with dropout keyed by token."""
    batch = module.declutr_keys
    assert isinstance(batch, DropoutKeys)
    if drop := weight_dropout(module, dropout, batch.tokens, batch.attention):
        shared = query.shape[1] // key.shape[1]  # query heads that share a key head
        key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
        attend = attend_in_parts if query.is_cuda else attend_with_dropout
        return attend(query, key, value, attention_mask, scaling, drop).transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, **kwargs
    )
    return output


def weight_dropout(
    module: torch.nn.Module,  # the attention layer, of a model that `prepare_modules` has prepared
    dropout: float,  # the layer's own probability, which may be 0 where the batch has rates
    keys: Tensor | None,  # keys of the query tokens
    rates: TokenRates | None,  # rates of the query tokens, instead of the layer's own
) -> WeightDropout | None:
    """The dropout of an attention layer's weights; None if none is dropped."""
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
    # Half precision loses small weights.
    weights = scores.softmax(dim=-1, dtype=scores.dtype if scores.dtype == torch.float64 else torch.float32)
    return drop.apply(weights).to(value.dtype) @ value


def attend_in_parts(
    query: Tensor,  # `(spans, heads, longest, head_dim)`
    key: Tensor,  # keys of the same shape
    value: Tensor,  # values of the same shape
    mask: Tensor | None,  # boolean or numbers, which broadcast to the weights; None: every key may be attended to
    scaling: float | None,  # factor of the scores; None means 1 / sqrt(head_dim)
    drop: WeightDropout,  # dropout of the weights, with keys `(spans, longest)`
) -> Tensor:
    """As `attend_with_dropout`, some spans at a time; the backward computes the weights of each part again."""
    spans, heads, longest = query.shape[:3]
    size = max(1, _WEIGHTS // max(1, heads * longest * longest))  # a span above the limit is a part of its own
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
                preserve_rng_state=False,  # keys decide what is dropped, so nothing is drawn
            )
        )
    return torch.cat(parts)
