"""Batches of many fits in parallel: the rows each fit sees at each step, and its dropout factors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import Rows, TrainingSet, orders

Stream = tuple[int, int]  # `TrainingSet.stream`


@dataclass(frozen=True)
class Padded:
    """Row numbers of S sets in one padded array."""

    rows: Tensor
    """(S, longest), padded with 0."""
    sizes: Tensor
    """(S,) numbers of real rows."""

    @classmethod
    def of(cls, rows: Sequence[Rows]) -> "Padded":
        """Pad every set to the longest."""
        sizes = [len(own) for own in rows]
        padded = np.zeros((len(rows), max(sizes)), np.int64)
        for place, own in enumerate(rows):
            padded[place, : len(own)] = own
        return cls(torch.from_numpy(padded), torch.tensor(sizes))

    def __getitem__(self, sets: slice | Tensor) -> "Padded":
        return Padded(self.rows[sets], self.sizes[sets])


@dataclass(frozen=True)
class Batch:
    """One step of S sets."""

    rows: Tensor
    """(S, B) row numbers of the training table."""
    labels: Tensor
    """(S, B)."""
    weight: float | Tensor
    """Weight of each row in its set's mean loss: a number, or (S, 1, 1, B) with 0 for padding."""
    kept: Tensor | None
    """(S, 1, H, B) dropout factors, 0 or 1/(1-p); None without dropout."""


class Schedule:
    """Batches of sets whose passes have the same number of batches.

    Sets of one stream see the same positions and the same dropout, because every official fit starts from one seed.

    `labels` (N,) are those of the training table. `start` is the generator after drawing the starting weights; dropout
    continues its sequence.
    """

    def __init__(
        self, sets: Sequence[TrainingSet], labels: Tensor, config: ClassifierConfig, start: torch.Generator
    ) -> None:
        self.members = Padded.of([s.train for s in sets])
        self._labels, self._config = labels, config
        self._streams = [s.stream for s in sets]
        self._orders = {stream: orders(config.seed, *stream) for stream in self._streams}
        self._passes: list[dict[Stream, Rows]] = []
        dropped = config.num_hidden > 0 and config.dropout > 0
        self._dropout = {stream: start.clone_state() for stream in self._streams} if dropped else {}
        self._next_dropout = dict(self._dropout)

    def draw(self, num_passes: int) -> None:
        """Draw the orders of the next passes."""
        current = dict.fromkeys(self._streams)
        self._passes = [{stream: next(self._orders[stream]) for stream in current} for _ in range(num_passes)]
        self._dropout = dict(self._next_dropout)

    def keep(self, places: Tensor) -> None:
        """Continue with these sets only."""
        self.members = self.members[places]
        self._streams = [self._streams[place] for place in places.tolist()]

    def batches(self, block: slice) -> Iterator[Batch]:
        """Every batch of the drawn passes, for some of the sets; read it to the end, block after block."""
        members, streams = self.members[block], self._streams[block]
        # Blocks that share a stream draw the same factors, each from a copy.
        dropout = {stream: self._dropout[stream].clone_state() for stream in streams} if self._dropout else {}
        for permutations in self._passes:
            yield from self._one_pass(members, streams, permutations, dropout)
        self._next_dropout |= dropout

    def _one_pass(
        self,
        members: Padded,
        streams: list[Stream],
        permutations: dict[Stream, Rows],
        dropout: dict[Stream, torch.Generator],
    ) -> Iterator[Batch]:
        batch_size = self._config.batch_size
        longest, shortest = int(members.sizes.max()), int(members.sizes.min())
        tail = np.arange(longest)
        positions = {s: np.concatenate([permutations[s], tail[s[1] :]]) for s in dict.fromkeys(streams)}
        order = torch.from_numpy(np.stack([positions[stream] for stream in streams]))
        rows = members.rows.gather(1, order)
        labels = self._labels[rows]
        for start in range(0, longest, batch_size):
            width = min(batch_size, longest - start)
            weight: float | Tensor = 1 / batch_size
            if start + batch_size > shortest:
                counts = (members.sizes - start).clamp(max=batch_size)[:, None]
                weight = ((torch.arange(width) < counts) / counts)[:, None, None]
            part = slice(start, start + width)
            kept = self._kept(streams, dropout, start, width) if dropout else None
            yield Batch(rows[:, part], labels[:, part], weight, kept)

    def _kept(self, streams: list[Stream], dropout: dict[Stream, torch.Generator], start: int, width: int) -> Tensor:
        """Dropout factors that `torch.nn.Dropout` would draw on a CPU for a batch (B, H) in each set's stream."""
        num_hidden, keep = self._config.num_hidden, 1 - self._config.dropout
        drawn = {}
        for stream in dict.fromkeys(streams):
            count = min(width, stream[1] - start)
            factors = torch.zeros(num_hidden, width)
            factors[:, :count] = torch.empty(count, num_hidden).bernoulli_(keep, generator=dropout[stream]).mT
            drawn[stream] = factors.div_(keep)
        return torch.stack([drawn[stream] for stream in streams])[:, None]
