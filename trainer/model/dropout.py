"""Dropout with masks that depend on tokens, not on batches: equal for any packing, microbatch and world size.

torch's dropout draws from a stream, so a mask depends on all earlier draws. Here a hash of (token key, layer, feature)
decides about an element, and the key comes from (seed, epoch, document, span, position). A second forward of the same
token, in another microbatch or on another worker, drops the same elements.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import seeding


@dataclass(frozen=True)
class TokenRates:
    """Dropout rates of tokens, instead of one rate of a layer.

    Attributes:
        limits: int32; an element is dropped if its mixed word is below the limit of its token.
        factors: float64, 1 / (1 - p), by which kept elements are multiplied.
        any: True if a rate is above 0.
    """

    limits: Tensor
    factors: Tensor
    any: bool

    @staticmethod
    def of(rates: Tensor, lengths: Tensor, device: torch.device) -> "TokenRates":
        """Rates `(T,)` of the spans' tokens.

        Args:
            rates: `(S,)` float64 probability of each span, 0 to 1 (exclusive); on the CPU.
            lengths: `(S,)` number of tokens of each span, on the CPU.
            device: device of the result.
        """
        limits = ((rates * 2**32).long() - 2**31).to(torch.int32)
        limits, factors = (torch.repeat_interleave(each, lengths).to(device) for each in (limits, 1 / (1 - rates)))
        return TokenRates(limits, factors, bool((rates > 0).any()))

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> "TokenRates":
        """The rates of the same tokens in another shape."""
        return TokenRates(change(self.limits), change(self.factors), self.any)

    def apply(self, values: Tensor, mixed: Tensor) -> Tensor:
        """Drops elements of values `(..., H)`, whose leading shape is that of the rates, and scales the others.

        Args:
            values: hidden states or attention weights.
            mixed: `(..., H)` int32 words of the elements, overwritten.
        """
        factors = self.factors.to(torch.promote_types(values.dtype, torch.float32))[..., None]
        return (values.masked_fill(drops(mixed, self.limits[..., None]), 0.0) * factors).to(values.dtype)


NEVER = 2.0**-60
"""Probability of a layer that drops nothing but exists, because some batches have rates for it."""


class DropoutKeys:
    """Keys of the tokens in an encoder, shared by all its dropout layers.

    They are kept until the next forward, because activation checkpointing repeats parts of a forward in the backward.

    Attributes:
        tokens: int32 keys with the leading shape of the hidden states; None for a batch without keys.
        hidden: rates of the tokens' hidden states, with the same shape; None: every layer has its own rate.
        attention: rates of the tokens' attention weights, as queries.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the batch."""
        self.tokens: Tensor | None = None
        self.hidden: TokenRates | None = None
        self.attention: TokenRates | None = None


class KeyedDropout(nn.Module):
    """Drops elements of hidden states with probability p and scales the others by 1 / (1 - p).

    Explicit attention weights `(S, heads, L, L)` of some families are dropped by (query token, head, key position).
    Values without a dimension for spans are left unchanged.

    Args:
        p: probability, 0 to 1 (exclusive).
        layer: number of this layer in its encoder.
        keys: keys of the encoder's tokens.
        width: largest number of features of the hidden states.
    """

    features: Tensor

    def __init__(self, p: float, layer: int, keys: DropoutKeys, width: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.keys = keys
        self.register_buffer("features", words(layer, width, torch.device("cpu")), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Drops elements of hidden states `(..., H)`, whose leading shape is that of the keys, or of attention weights.

        Raises:
            RuntimeError: the batch has no `SpanBatch.keys`, which training needs.
        """
        if not self.training or (self.p == 0 and self.keys.hidden is None):
            return hidden
        keys, rates = self.keys.tokens, self.keys.hidden
        if keys is None:
            raise RuntimeError("dropout needs the keys of its tokens: SpanBatch.keys is missing")
        *rows, length = keys.shape
        if hidden.shape[:-1] != keys.shape:
            if hidden.ndim == 4 and [hidden.shape[0]] == rows and hidden.shape[2:] == (length, length):
                return drop_attention(hidden, keys, self.layer, self.p, self.keys.attention)
            if hidden.ndim <= keys.ndim:  # of no span, like DeBERTa's embeddings of distances: any mask of the whole
                return hidden  # batch would change with the microbatch
            if list(hidden.shape[:-2]) != rows or hidden.shape[-2] < length:
                return F.dropout(hidden, self.p)  # values that belong to no token; `drops_by_key` finds these families
            missing = (0, hidden.shape[-2] - length)  # Longformer pads its input again
            keys = F.pad(keys, missing)
            rates = None if rates is None else rates.rearranged(lambda each: F.pad(each, missing))
        mixed = keys[..., None] + self.features[: hidden.shape[-1]]
        if rates is not None:
            return rates.apply(hidden, mixed)
        return hidden.masked_fill(drops(mixed, limit(self.p)), 0.0) * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Parameters for printing the encoder."""
        return f"p={self.p}, layer={self.layer}"


def limit(p: float) -> int:
    """The limit of `drops` for a probability."""
    return int(p * 2**32) - 2**31


def drops(words_: Tensor, limits: int | Tensor) -> Tensor:
    """Mask of dropped elements: a 32-bit mix of `words_` (int32, overwritten) is below the limit.

    Two rounds of xor-shift and multiplication are enough, because the words are sums of uniform random words.
    """
    words_ ^= words_ >> 16
    words_ *= 0x7FEB352D
    words_ ^= words_ >> 15
    words_ *= _signed(0x846CA68B)
    return words_ < limits


def words(stream: int, count: int, device: torch.device) -> Tensor:
    """`(count,)` fixed uniform int32 words of a stream, for example one for each feature of a layer."""
    zero = np.zeros(1, np.uint64)
    drawn = seeding.words(stream, "dropout", zero, zero, count)[0]
    return torch.from_numpy(drawn.view(np.int32).copy()).to(device)


_TABLES: dict[tuple[int, torch.device], Tensor] = {}


def drop_attention(
    weights: Tensor, query_keys: Tensor, layer: int, p: float, rates: TokenRates | None = None
) -> Tensor:
    """Drops attention weights `(spans, heads, longest, longest)` by (query token, head, key position).

    Args:
        weights: softmax over the last dimension.
        query_keys: `(spans, longest)` keys of the query tokens.
        layer: number of the attention layer.
        p: probability.
        rates: `(spans, longest)` rates of the query tokens, instead of `p`.
    """
    heads, longest = weights.shape[1], weights.shape[-1]
    mixed = query_keys[:, None, :, None] + _table(layer, heads, longest, query_keys.device)
    if rates is None:
        return weights.masked_fill(drops(mixed, limit(p)), 0.0) * (1 / (1 - p))
    return rates.rearranged(lambda each: each[:, None]).apply(weights, mixed)


def _table(layer: int, heads: int, longest: int, device: torch.device) -> Tensor:
    """Cached words of a layer for each head and key position, `(heads, 1, longest)`."""
    table = _TABLES.get((layer, device))
    if table is None or table.shape[0] < heads or table.shape[1] < longest:
        rows = [words((1 << 32) + layer * 4096 + head, max(512, longest), device) for head in range(heads)]
        table = _TABLES[layer, device] = torch.stack(rows)
    return table[:heads, None, :longest]


def token_keys(span_keys: Tensor, lengths: Tensor) -> Tensor:
    """`(T,)` int32 keys of the spans' tokens.

    Args:
        span_keys: `(S,)` int32 uniform words, one for each span.
        lengths: `(S,)` number of tokens of each span, on the CPU.
    """
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    place = (torch.arange(int(lengths.sum())) - starts).to(torch.int32).to(span_keys.device)
    mixed = torch.repeat_interleave(span_keys, lengths.to(span_keys.device)) + place * _signed(0x9E3779B9)
    mixed ^= mixed >> 16
    mixed *= 0x21F0AAAD
    mixed ^= mixed >> 15
    return mixed


def key_dropout(model: nn.Module, keys: DropoutKeys, width: int) -> None:
    """Replaces every dropout layer of a model by a keyed one, numbered in the model's order.

    Args:
        model: changed in place.
        keys: keys of the model's tokens.
        width: largest number of features of its hidden states.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    layers = [(parent, name, child) for parent, name, child in found if isinstance(child, nn.Dropout)]
    for number, (parent, name, child) in enumerate(layers):
        setattr(parent, name, KeyedDropout(child.p, number, keys, width))


def _signed(word: int) -> int:
    """Converts a 32-bit word to the signed number with the same bits."""
    return word - 2**32 if word >= 2**31 else word
