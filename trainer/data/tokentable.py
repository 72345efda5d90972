"""A table of the tokens of packed spans, which the layers read; computed on the CPU with the batch.

The collator's thread computes it and copies it to the GPU from page-locked memory, so a step never waits for such a
copy.

Legend: S spans, T tokens of all spans together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from declutr.trainer.data.tokenrates import TokenRates, token_keys


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
        hidden, attention = (TokenRates.of(each, lengths) for each in rates.T)
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
        part = self.moved(lambda each: each[start:end])
        bounds = self.bounds[first : last + 1] - start
        return type(self)(
            self.lengths[first:last],
            bounds,
            part.owners - first,
            part.places,
            part.keys,
            part.hidden,
            part.attention,
        )
