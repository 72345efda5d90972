"""What batches of tokens and of patches have in common.

Legend: S spans, T tokens of all spans together.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor


class PackedBatch(ABC):
    """Spans on one device, packed one after the other without padding: what tokens and patches have in common.

    Attributes:
        lengths: `(S,)` tokens of each span; on the CPU, for planning.
    """

    lengths: Tensor

    @property
    def num_spans(self) -> int:
        """Number of spans, S."""
        return len(self.lengths)

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens, T."""

    def to(self, device: torch.device) -> Self:
        """The batch on another device."""
        return self._moved(lambda each: each.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, from which copies to a GPU overlap with its work."""
        return self._moved(Tensor.pin_memory)

    @abstractmethod
    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self: ...

    def microbatches(self, max_tokens: int | None) -> list[Self]:
        """Consecutive spans in pieces of at most `max_tokens` tokens; a longer span is a separate piece."""
        if max_tokens is None or self.num_tokens <= max_tokens:
            return [self]
        return self.slices(pieces(self.lengths.tolist(), max_tokens))

    def span_slice(self, start: int, end: int) -> Self:
        """The spans [start, end) as a separate batch."""
        return self.slices([(start, end)])[0]

    @abstractmethod
    def slices(self, cuts: Sequence[tuple[int, int]]) -> list[Self]:
        """The spans of each [start, end) as separate batches."""


def pieces(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cuts consecutive spans into [start, end) with at most `limit` tokens each; a longer span is a separate piece."""
    found, start, total = [], 0, 0
    for place, size in enumerate(sizes):
        if total and total + size > limit:
            found.append((start, place))
            start, total = place, 0
        total += size
    return [*found, (start, len(sizes))] if start < len(sizes) else found
