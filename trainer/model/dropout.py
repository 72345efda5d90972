"""Dropout with masks that depend on tokens, not on batches: equal for any packing, microbatch and world size.

torch's dropout draws from a stream, so a mask depends on all earlier draws. Here a hash of (token key, layer, feature)
decides about an element, and the key comes from (seed, epoch, document, span, position). A second forward of the same
token, in another microbatch or on another worker, drops the same elements.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import seeding


class DropoutKeys:
    """Keys of the tokens in an encoder, shared by all its dropout layers.

    They are kept until the next forward, because activation checkpointing repeats parts of a forward in the backward.

    Attributes:
        tokens: int32 keys with the leading shape of the hidden states; None for a batch without keys.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | None = None


class KeyedDropout(nn.Module):
    """Drops elements of hidden states with probability p and scales the others by 1 / (1 - p).

    Explicit attention weights `(S, heads, L, L)` of some families are dropped by (query token, head, key position).

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
        if not self.training or self.p == 0:
            return hidden
        keys = self.keys.tokens
        if keys is None:
            raise RuntimeError("dropout needs the keys of its tokens: SpanBatch.keys is missing")
        dropped = self._dropped(hidden, keys)
        if dropped is None:
            return F.dropout(hidden, self.p)
        return hidden.masked_fill(dropped, 0.0) * (1 / (1 - self.p))

    def _dropped(self, hidden: Tensor, keys: Tensor) -> Tensor | None:
        """Mask of dropped elements; None for values that belong to no token, like DeBERTa's distance embeddings."""
        *rows, length = keys.shape
        if hidden.shape[:-1] != keys.shape:
            if hidden.ndim == 4 and [hidden.shape[0]] == rows and hidden.shape[2:] == (length, length):
                return _ATTENTION.dropped(keys, self.layer, hidden.shape[1], length, self.p)
            if list(hidden.shape[:-2]) != rows or hidden.shape[-2] < length:
                return None
            keys = F.pad(keys, (0, hidden.shape[-2] - length))  # Longformer pads its input again
        return drops(keys[..., None] + self.features[: hidden.shape[-1]], self.p)

    def extra_repr(self) -> str:
        """Parameters for printing the encoder."""
        return f"p={self.p}, layer={self.layer}"


def drops(words_: Tensor, p: float) -> Tensor:
    """Mask of dropped elements: a 32-bit mix of `words_` (int32, overwritten) falls into the lowest share p.

    Two rounds of xor-shift and multiplication are enough, because the words are sums of uniform random words.
    """
    words_ ^= words_ >> 16
    words_ *= 0x7FEB352D
    words_ ^= words_ >> 15
    words_ *= _signed(0x846CA68B)
    return words_ < int(p * 2**32) - 2**31


def words(stream: int, count: int, device: torch.device) -> Tensor:
    """`(count,)` fixed uniform int32 words of a stream, for example one for each feature of a layer."""
    zero = np.zeros(1, np.uint64)
    drawn = seeding.words(stream, "dropout", zero, zero, count)[0]
    return torch.from_numpy(drawn.view(np.int32).copy()).to(device)


class AttentionDropout:
    """Dropout of attention weights, with cached random words for each (layer, head, key position)."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.device], Tensor] = {}

    def dropped(self, query_keys: Tensor, layer: int, heads: int, longest: int, p: float) -> Tensor:
        """Mask of dropped attention weights, `(spans, heads, longest, longest)`.

        Args:
            query_keys: `(spans, longest)` keys of the query tokens.
            layer: number of the attention layer.
            heads: number of its heads.
            longest: tokens of the group's longest span.
            p: probability.
        """
        table = self._tables.get((layer, query_keys.device))
        if table is None or table.shape[0] < heads or table.shape[1] < longest:
            rows = [
                words((1 << 32) + layer * 4096 + head, max(512, longest), query_keys.device) for head in range(heads)
            ]
            table = self._tables[layer, query_keys.device] = torch.stack(rows)
        return drops(query_keys[:, None, :, None] + table[None, :heads, None, :longest], p)


_ATTENTION = AttentionDropout()


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
