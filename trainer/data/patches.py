"""Clips as the encoder reads them: patches of images or spectrograms, packed one after the other without padding.

Legend: S clips, T tokens of all clips together (a CLS token and the patches of each), F values of a patch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from declutr.trainer.data.packedbatch import PackedBatch, digest_of

_MULTIPLIER = 0xD6E8FEB86659FD93  # odd, so that multiplication by its powers loses no bit


@dataclass(frozen=True)
class PatchBatch(PackedBatch):
    """Clips on one device, with the interface of `SpanBatch`; nothing of them is predicted.

    Attributes:
        values: `(T, F)` values of the patches, uint8 pixels or float32; zero for a CLS token.
        places: `(T,)` int64, 0 for a CLS token, else 1 + place of the patch in its clip.
        lengths: `(S,)` tokens of each clip; on the CPU, for planning.
        keys: `(S,)` int32 keys of each clip's dropout, on the CPU; None if nothing is dropped.
        rates: `(S, 2)` dropout rates of hidden states and attention weights, on the CPU; None: those of the layers.
    """

    values: Tensor
    places: Tensor
    lengths: Tensor
    keys: Tensor | None = None
    rates: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.places)

    @property
    def device(self) -> torch.device:
        """Device of the patches."""
        return self.places.device

    @property
    def selected(self) -> Tensor:
        """No token is selected for MLM."""
        return self.places.new_empty(0)

    @property
    def labels(self) -> Tensor:
        """No token is predicted."""
        return self.places.new_empty(0)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, values=move(self.values), places=move(self.places))

    def digest(self) -> int:
        """A number below DIGEST that is determined by the clips, on the CPU; see `SpanBatch.digest`."""
        raw = np.ascontiguousarray(self.values.numpy()).view(np.uint8).reshape(self.num_tokens, -1)
        raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 8)))
        powers = np.cumprod(np.full(raw.shape[1] // 8, _MULTIPLIER, np.uint64))
        tokens = (raw.view(np.uint64) * powers).sum(axis=1) + self.places.numpy().astype(np.uint64)
        return digest_of(tokens + np.uint64(1), self.lengths, self.keys)

    def with_blank(self) -> "PatchBatch":
        """The batch and a last clip of a CLS token alone, which sharded layers need."""
        return PatchBatch(
            F.pad(self.values, (0, 0, 0, 1)),
            F.pad(self.places, (0, 1)),
            F.pad(self.lengths, (0, 1), value=1),
            None if self.keys is None else F.pad(self.keys, (0, 1)),
            None if self.rates is None else F.pad(self.rates, (0, 0, 0, 1)),
        )

    def unselected(self) -> Self:
        """The batch, of which no token is predicted."""
        return self

    def _slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        (first, last), (start, end) = spans, tokens
        return type(self)(
            self.values[start:end],
            self.places[start:end],
            self.lengths[first:last],
            None if self.keys is None else self.keys[first:last],
            None if self.rates is None else self.rates[first:last],
        )
