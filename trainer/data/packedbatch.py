"""Packed spans: what batches of tokens and of patches share, and the places and dropout of their tokens.

A token's dropout depends on its key and rate alone, by the hash of `drops` (trainer/model/dropout.py).

Legend: S spans, T tokens of all spans together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class TokenRates:
    """Dropout rates of tokens, instead of one rate of a layer."""

    limits: Tensor  # int32; an element is dropped if its mixed word is below the limit of its token
    factors: Tensor  # float64, 1 / (1 - p), by which kept elements are multiplied
    any: bool  # True if a rate is above 0

    @staticmethod
    def of(
        rates: Tensor,  # `(S,)` float64 probability of each span, 0 to 1 (exclusive); on the CPU
        lengths: Tensor,  # `(S,)` number of tokens of each span, on the CPU
    ) -> "TokenRates":
        """Rates `(T,)` of the spans' tokens."""
        limits = ((rates * 2**32).long() - 2**31).to(torch.int32)
        limits, factors = (torch.repeat_interleave(values, lengths) for values in (limits, 1 / (1 - rates)))
        return TokenRates(limits, factors, bool((rates > 0).any()))

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> "TokenRates":
        """The rates of the same tokens in another shape."""
        return TokenRates(change(self.limits), change(self.factors), self.any)

    def apply(
        self,
        values: Tensor,  # hidden states or attention weights
        mixed: Tensor,  # `(..., H)` int32 words of the elements, overwritten
    ) -> Tensor:
        """Drops elements of values `(..., H)`, whose leading shape is that of the rates, and scales the others."""
        # bfloat16 has no number near 1 / 0.85
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


def signed(word: int) -> int:
    """Converts a 32-bit word to the signed number with the same bits."""
    return word - 2**32 if word >= 2**31 else word


@dataclass(frozen=True)
class TokenTable:
    """Spans, places and dropout of the tokens, which the layers read, on the batch's device.

    The collator's thread computes it on the CPU and copies it to the GPU from page-locked memory, so that a step never
    waits for such a copy.
    """

    lengths: Tensor  # `(S,)` int64 tokens of each span
    bounds: Tensor  # `(S + 1,)` int32 start of each span, and the end of the last
    owners: Tensor  # `(T,)` int64 number of each token's span
    places: Tensor  # `(T,)` int64 place of each token in its span
    keys: Tensor | None = None  # `(T,)` int32 dropout keys; None if nothing is dropped
    hidden: TokenRates | None = None  # dropout rates of the tokens' hidden states; None: those of the layers
    attention: TokenRates | None = None  # dropout rates of the tokens' attention weights, as queries

    @classmethod
    def of(
        cls,
        lengths: Tensor,  # `(S,)` tokens of each span
        keys: Tensor | None,  # `(S,)` int32 dropout keys, or None
        rates: Tensor | None,  # `(S, 2)` dropout rates of hidden states and attention weights, or None
    ) -> Self:
        """The table of spans on the CPU."""
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        places = torch.arange(len(owners)) - bounds[:-1].long()[owners]
        mixed = None
        if keys is not None:  # a token's key is a mix of its span's key and of its place
            mixed = keys[owners] + places.to(torch.int32) * signed(0x9E3779B9)
            mixed ^= mixed >> 16
            mixed *= 0x21F0AAAD
            mixed ^= mixed >> 15
        if rates is None:
            return cls(lengths, bounds, owners, places, mixed)
        hidden, attention = (TokenRates.of(column, lengths) for column in rates.T)
        return cls(lengths, bounds, owners, places, mixed, hidden, attention)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The table after `move` of each tensor, for example to page-locked memory."""
        moved: dict[str, Any] = {
            name: value.rearranged(move) if isinstance(value, TokenRates) else move(value)
            for name, value in vars(self).items()
            if value is not None
        }
        return replace(self, **moved)

    def slice(
        self,
        spans: tuple[int, int],  # first span of the part, and the span after its last
        tokens: tuple[int, int],  # first token of the part, and the token after its last
    ) -> Self:
        """The part of consecutive spans."""
        (first, last), (start, end) = spans, tokens
        part = self.moved(lambda tensor: tensor[start:end])
        bounds = self.bounds[first : last + 1] - start
        return replace(part, lengths=self.lengths[first:last], bounds=bounds, owners=part.owners - first)


DIGEST = 2**40  # limit of digests, so that float64 sums those of thousands of ranks exactly
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication by its powers loses no bit


class PackedBatch:
    """Spans on one device, packed one after the other without padding: what tokens and patches have in common."""

    by_token: ClassVar[tuple[str, ...]]  # fields with an entry for each token, on the batch's device
    __dataclass_fields__: ClassVar[dict[str, Any]]  # of each kind of batch, for `replace`
    lengths: Tensor  # `(S,)` tokens of each span; on the CPU, for planning
    keys: Tensor | None  # `(S,)` int32 keys of each span's dropout, on the CPU; None if nothing is dropped
    # `(S, 2)` float64 dropout rates of each span's hidden states and attention weights, instead of those of the
    # encoder's layers; on the CPU. None: the layers' rates.
    rates: Tensor | None

    def _tensors(self, *names: str) -> dict[str, Tensor]:
        """Those of the fields that are present."""
        return {name: values for name in names if (values := getattr(self, name)) is not None}

    @property
    def num_spans(self) -> int:
        """Number of spans, S."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(getattr(self, self.by_token[0]))

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return getattr(self, self.by_token[0]).device

    @property
    def longest(self) -> int:
        """Tokens of the longest span; 0 without spans."""
        return int(self.lengths.numpy().max(initial=0))

    @cached_property
    def table(self) -> TokenTable:
        """Spans, places and dropout of the tokens, on the batch's device."""
        return TokenTable.of(self.lengths, self.keys, self.rates).moved(lambda tensor: to_device(tensor, self.device))

    def to(self, device: torch.device) -> Self:
        """The batch on another device; copies to a GPU overlap with its work."""
        return self.moved(lambda tensor: to_device(tensor, device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The batch after `move` of each tensor that the layers read."""
        batch = replace(self, **{name: move(values) for name, values in self._tensors(*self.by_token).items()})
        vars(batch)["table"] = self.table.moved(move)  # as cached_property keeps it
        return batch

    def unselected(self) -> Self:
        """The batch without tokens to predict."""
        return self

    def with_blank(self) -> Self:
        """The batch and a last span of one token, which sharded layers need (trainer/parallel/communicator.py)."""
        tensors = self._tensors(*self.by_token, "keys", "rates")
        padded = {name: F.pad(values, (0, 0) * (values.ndim - 1) + (0, 1)) for name, values in tensors.items()}
        return replace(self, **padded, lengths=F.pad(self.lengths, (0, 1), value=1))

    def microbatches(self, max_tokens: int | None) -> list[Self]:
        """Consecutive spans in pieces of at most `max_tokens` tokens; a longer span is a separate piece."""
        if max_tokens is None or self.num_tokens <= max_tokens:
            return [self]
        return self.slices(pieces(self.lengths.tolist(), max_tokens))

    def span_slice(self, start: int, end: int) -> Self:
        """The spans [start, end) as a separate batch."""
        return self.slices([(start, end)])[0]

    def slices(self, cuts: Sequence[tuple[int, int]]) -> list[Self]:
        """The spans of each [start, end) as separate batches."""
        bounds = [0, *self.lengths.numpy().cumsum().tolist()]
        batches = []
        for start, end in cuts:
            tokens = bounds[start], bounds[end]
            batches.append(self._slice((start, end), tokens))
            if "table" in vars(self):  # already computed
                # on a GPU, a new one would be copied there again
                vars(batches[-1])["table"] = self.table.slice((start, end), tokens)
        return batches

    def _slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        """The spans [first, last), whose tokens are [start, end)."""
        parts = {name: values[slice(*tokens)] for name, values in self._tensors(*self.by_token).items()}
        of_spans = {name: values[slice(*spans)] for name, values in self._tensors("lengths", "keys", "rates").items()}
        return replace(self, **parts, **of_spans)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device; the copy of values on the CPU to a GPU overlaps with the GPU's work."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def pieces(sizes: Sequence[int], limit: int, by_length: bool = False) -> list[tuple[int, int]]:
    """Cuts consecutive spans into [start, end) with at most `limit` tokens each; a longer span is a separate piece.

    `by_length` cuts at a change of length, too, once half of the limit is reached.
    """
    cuts, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        changed = by_length and size != sizes[place - 1] and 2 * total >= limit
        if total and (changed or total + size > limit):
            cuts.append((start, place))
            start, total = place, 0
        total += size
    return [*cuts, (start, len(sizes))] if start < len(sizes) else cuts


def digest_of(
    values: NDArray[np.uint64],  # `(T,)` a number for each token
    lengths: Tensor,  # `(S,)` tokens of each span
    keys: Tensor | None,  # `(S,)` int32 dropout keys, or None
) -> int:
    """A number below DIGEST for spans: a sum over spans, each mixed from its tokens' numbers and its dropout key."""
    if not len(lengths):
        return 0
    sizes = lengths.numpy()
    starts = np.cumsum(sizes) - sizes
    powers = np.cumprod(np.full(int(sizes.max()), _MULTIPLIER, np.uint64))
    factors = powers[np.arange(len(values)) - np.repeat(starts, sizes)]
    mixed = np.add.reduceat(values * factors, starts)
    if keys is not None:
        mixed ^= keys.numpy().astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(_MULTIPLIER)
    return int((mixed ^ (mixed >> np.uint64(29))).sum() % np.uint64(DIGEST))
