"""The common part of batches of tokens and of patches.

Legend: S spans, T tokens of all spans together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from declutr.trainer.data.tokenrates import TokenTable

DIGEST = 2**40  # limit of digests, so that float64 sums those of thousands of ranks exactly
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplication by its powers loses no bit


class PackedBatch(ABC):
    """Spans on one device, packed one after the other without padding: what tokens and patches have in common.

    Attributes:
        lengths: `(S,)` tokens of each span; on the CPU, for planning.
        keys: `(S,)` int32 keys of each span's dropout, on the CPU; None if nothing is dropped.
        rates: `(S, 2)` float64 dropout rates of each span's hidden states and attention weights, on the CPU; None:
            those of the encoder's layers.
    """

    lengths: Tensor
    keys: Tensor | None
    rates: Tensor | None

    @property
    def num_spans(self) -> int:
        """Number of spans, S."""
        return len(self.lengths)

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens, T."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the tokens."""

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
        batch = self._moved(move)
        vars(batch)["table"] = self.table.moved(move)  # as cached_property keeps it
        return batch

    @abstractmethod
    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self: ...

    @abstractmethod
    def unselected(self) -> Self:
        """The batch without tokens to predict."""

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
                vars(batches[-1])["table"] = self.table.slice((start, end), tokens)
        return batches

    @abstractmethod
    def _slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        """The spans [first, last), whose tokens are [start, end)."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device; the copy of values on the CPU to a GPU overlaps with the GPU's work."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def pieces(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cuts consecutive spans into [start, end) with at most `limit` tokens each; a longer span is a separate piece."""
    cuts, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        if total and total + size > limit:
            cuts.append((start, place))
            start, total = place, 0
        total += size
    return [*cuts, (start, len(sizes))] if start < len(sizes) else cuts


def digest_of(values: NDArray[np.uint64], lengths: Tensor, keys: Tensor | None) -> int:
    """A number below DIGEST for spans: a sum over spans, each mixed from its tokens' numbers and its dropout key.

    Args:
        values: `(T,)` a number for each token.
        lengths: `(S,)` tokens of each span.
        keys: `(S,)` int32 dropout keys, or None.
    """
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
