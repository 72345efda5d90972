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

from declutr.common import seeding
from declutr.trainer.data.tokenrates import TokenRates, drops, limit

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
        self.layer = torch.tensor(layer, device="cpu")
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

    def extra_repr(self) -> str:
        """Parameters for printing the encoder."""
        return f"p={self.p}, layer={int(self.layer)}"


def words(stream: int, count: int, device: torch.device) -> Tensor:
    """`(count,)` fixed uniform int32 words of a stream, for example one for each feature of a layer."""
    zero = np.zeros(1, np.uint64)
    drawn = seeding.words(stream, "dropout", zero, zero, count)[0]
    return torch.from_numpy(drawn.view(np.int32).copy()).to(device)


_TABLES: dict[tuple[int, torch.device], Tensor] = {}


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of spans, by (query token, head, key position).

    Attributes:
        layer: number of the attention layer, a scalar tensor on the CPU.
        p: probability.
        keys: int32 keys of the query tokens, `(spans, longest)` or packed `(T,)`.
        rates: rates of the query tokens, instead of `p`.
    """

    layer: Tensor
    p: float
    keys: Tensor
    rates: TokenRates | None = None

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
    number = int(layer)
    table = _TABLES.get((number, device))
    if table is None or table.shape[0] < heads or table.shape[1] < longest:
        rows = [words((1 << 32) + number * 4096 + head, max(512, longest), device) for head in range(heads)]
        table = _TABLES[number, device] = torch.stack(rows)
    return table[:heads, :longest]


def key_dropout(model: nn.Module, keys: DropoutKeys, width: int) -> None:
    """Replaces every dropout layer of a model by a keyed one, numbered in the model's order.

    Args:
        model: changed in place.
        keys: keys of the model's tokens.
        width: largest number of features of its hidden states.
    """
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    layers = [(parent, name, child) for parent, name, child in children if isinstance(child, nn.Dropout)]
    for number, (parent, name, child) in enumerate(layers):
        setattr(parent, name, KeyedDropout(child.p, number, keys, width))
