"""Keys and rates of the dropout of tokens, and the hash that decides from them (trainer/model/dropout.py).

Legend: S spans, T tokens of all spans together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


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
    def of(rates: Tensor, lengths: Tensor) -> "TokenRates":
        """Rates `(T,)` of the spans' tokens.

        Args:
            rates: `(S,)` float64 probability of each span, 0 to 1 (exclusive); on the CPU.
            lengths: `(S,)` number of tokens of each span, on the CPU.
        """
        limits = ((rates * 2**32).long() - 2**31).to(torch.int32)
        limits, factors = (torch.repeat_interleave(values, lengths) for values in (limits, 1 / (1 - rates)))
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
    words_ *= signed(0x846CA68B)
    return words_ < limits


def token_keys(span_keys: Tensor, lengths: Tensor) -> Tensor:
    """`(T,)` int32 keys of the spans' tokens.

    Args:
        span_keys: `(S,)` int32 uniform words, one for each span.
        lengths: `(S,)` number of tokens of each span, on the CPU.
    """
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    place = (torch.arange(int(lengths.sum())) - starts).to(torch.int32)
    mixed = torch.repeat_interleave(span_keys, lengths) + place * signed(0x9E3779B9)
    mixed ^= mixed >> 16
    mixed *= 0x21F0AAAD
    mixed ^= mixed >> 15
    return mixed


def signed(word: int) -> int:
    """Converts a 32-bit word to the signed number with the same bits."""
    return word - 2**32 if word >= 2**31 else word


# A table of the tokens of packed spans, which the layers read; computed on the CPU with the batch.
#
# The collator's thread computes it and copies it to the GPU from page-locked memory, so a step never waits for such a
# copy.
#
# Legend: S spans, T tokens of all spans together.


@dataclass(frozen=True)
class TokenTable:
    """Spans, places and dropout of the tokens, on the batch's device.

    Attributes:
        lengths: `(S,)` int64 tokens of each span.
        bounds: `(S + 1,)` int32 start of each span, and the end of the last.
        owners: `(T,)` int64 number of each token's span.
        places: `(T,)` int64 place of each token in its span.
        keys: `(T,)` int32 dropout keys; None if nothing is dropped.
        hidden: dropout rates of the tokens' hidden states; None: those of the layers.
        attention: dropout rates of the tokens' attention weights, as queries.
    """

    lengths: Tensor
    bounds: Tensor
    owners: Tensor
    places: Tensor
    keys: Tensor | None = None
    hidden: TokenRates | None = None
    attention: TokenRates | None = None

    @classmethod
    def of(cls, lengths: Tensor, keys: Tensor | None, rates: Tensor | None) -> Self:
        """The table of spans on the CPU.

        Args:
            lengths: `(S,)` tokens of each span.
            keys: `(S,)` int32 dropout keys, or None.
            rates: `(S, 2)` dropout rates of hidden states and attention weights, or None.
        """
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        places = torch.arange(len(owners)) - bounds[:-1].long()[owners]
        words = None if keys is None else token_keys(keys, lengths)
        if rates is None:
            return cls(lengths, bounds, owners, places, words)
        hidden, attention = (TokenRates.of(column, lengths) for column in rates.T)
        return cls(lengths, bounds, owners, places, words, hidden, attention)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The table after `move` of each tensor, for example to page-locked memory."""
        return type(self)(
            move(self.lengths),
            move(self.bounds),
            move(self.owners),
            move(self.places),
            None if self.keys is None else move(self.keys),
            None if self.hidden is None else self.hidden.rearranged(move),
            None if self.attention is None else self.attention.rearranged(move),
        )

    def slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        """The part of consecutive spans.

        Args:
            spans: first span of the part, and the span after its last.
            tokens: first token of the part, and the token after its last.
        """
        (first, last), (start, end) = spans, tokens
        part = self.moved(lambda tensor: tensor[start:end])
        bounds = self.bounds[first : last + 1] - start
        return type(self)(
            self.lengths[first:last], bounds, part.owners - first, part.places, part.keys, part.hidden, part.attention
        )
