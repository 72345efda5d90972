"""Spans as the encoder reads them: packed one after the other without padding, or padded for encoders that cannot pack.

Legend: S spans, T tokens of all spans together (specials included), K tokens that are selected for MLM.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from declutr.trainer.data.packedbatch import PackedBatch, digest_of, to_device
from declutr.trainer.data.patches import PatchBatch

IGNORED = -100  # the label that torch's cross entropy leaves out


@dataclass(frozen=True)
class SpanBatch(PackedBatch):
    """Spans with their MLM targets, on one device.

    Attributes:
        input_ids: `(T,)` tokens of the spans, specials included, some of them masked.
        lengths: `(S,)` tokens of each span; on the CPU, for planning.
        selected: `(K,)` places in `input_ids`, ascending, whose original token is to be predicted.
        labels: `(K,)` the original tokens.
        keys: `(S,)` int32 keys of each span's dropout, on the CPU; None if nothing is dropped.
        rates: `(S, 2)` float64 dropout rates of each span's hidden states and attention weights, instead of those of
            the encoder's layers; on the CPU. None: the layers' rates.
    """

    input_ids: Tensor
    lengths: Tensor
    selected: Tensor
    labels: Tensor
    keys: Tensor | None = None
    rates: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.input_ids)

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.input_ids.device

    @cached_property
    def chosen(self) -> list[int]:
        """S + 1 numbers: the selected tokens before each span, and all."""
        bounds = np.concatenate([[0], self.lengths.numpy().cumsum()])
        counts: list[int] = np.searchsorted(self.selected.cpu().numpy(), bounds).tolist()  # `selected` is ascending
        return counts

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        batch = replace(self, input_ids=move(self.input_ids), selected=move(self.selected), labels=move(self.labels))
        vars(batch)["chosen"] = self.chosen  # on a GPU, `selected` could not be read without waiting
        return batch

    def digest(self) -> int:
        """A number below DIGEST that is determined by the spans: documents, tokens, masks, labels.

        It is a sum over spans. Therefore the digests of all ranks, summed modulo DIGEST, are the digest of the global
        batch for any number of ranks. The batch must be on the CPU.
        """
        # Labels are shifted by 20 bits to be larger than any token: no vocabulary has 2**20 ids.
        values = self.input_ids.numpy().astype(np.uint64) + np.uint64(1)
        values[self.selected.numpy()] += self.labels.numpy().astype(np.uint64) << np.uint64(20)
        return digest_of(values, self.lengths, self.keys)

    def with_blank(self) -> "SpanBatch":
        """The batch and a last span of one token, whose MLM label is ignored, so that it adds nothing to the loss."""
        return SpanBatch(
            F.pad(self.input_ids, (0, 1)),
            F.pad(self.lengths, (0, 1), value=1),
            F.pad(self.selected, (0, 1), value=self.num_tokens),
            F.pad(self.labels, (0, 1), value=IGNORED),
            None if self.keys is None else F.pad(self.keys, (0, 1)),
            None if self.rates is None else F.pad(self.rates, (0, 0, 0, 1)),
        )

    def unselected(self) -> Self:
        """The batch without tokens to predict."""
        batch = replace(self, selected=self.selected[:0], labels=self.labels[:0])
        vars(batch)["table"] = self.table
        return batch

    def _slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        (first, last), (start, end) = spans, tokens
        picked = slice(self.chosen[first], self.chosen[last])
        batch = type(self)(
            self.input_ids[start:end],
            self.lengths[first:last],
            self.selected[picked] - start,
            self.labels[picked],
            None if self.keys is None else self.keys[first:last],
            None if self.rates is None else self.rates[first:last],
        )
        vars(batch)["chosen"] = [count - picked.start for count in self.chosen[first : last + 1]]
        return batch


AnyBatch = SpanBatch | PatchBatch
"""Spans of tokens, or clips of patches."""


class CanonicalMicrobatch(NamedTuple):
    """A canonical microbatch (trainer/data/canonical.py).

    Attributes:
        number: its number in the global batch.
        num_documents: rows of the shards.
        num_spans: its spans.
        num_rows: its rows of views.
    """

    number: int
    num_documents: int
    num_spans: int
    num_rows: int


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of a task's batch in a step.

    Attributes:
        spans: packed spans of its documents.
        num_documents: rows of the shards; 0 when there are more ranks than documents.
        num_rows: m, rows of views that the objective makes from the spans; 0 if the loss uses no embeddings.
        views: `(m, V)` int64, number of the span of each view. None: the objective knows the order.
        facts: `(m,)` int64 each, properties of a row that the loss needs in addition to its views, such as a label.
        digest: digest of the spans (SpanBatch.digest); 0 if it was not computed.
        canonical: canonical microbatches of which the spans are composed; empty if there are none.
    """

    spans: AnyBatch
    num_documents: int
    num_rows: int
    facts: dict[str, Tensor] = field(default_factory=dict)
    digest: int = 0
    views: Tensor | None = None
    canonical: tuple[CanonicalMicrobatch, ...] = ()

    @property
    def tokens(self) -> SpanBatch:
        """The spans of a batch of texts.

        Raises:
            TypeError: they are clips of patches.
        """
        if not isinstance(self.spans, SpanBatch):
            raise TypeError("a batch of images or sounds has patches, no tokens")
        return self.spans

    @cached_property
    def views_alike(self) -> bool:
        """True if all views of each row have the same dropout key, so that they cannot differ by dropout."""
        keys, rows = self.spans.keys, self.num_rows
        if keys is None or not rows or (self.views is None and len(keys) % rows):
            return False
        by_row = keys.view(rows, -1) if self.views is None else keys[self.views.cpu()]
        return bool((by_row == by_row[:, :1]).all())

    def to(self, device: torch.device) -> "RankBatch":
        """The batch on another device; copies to a GPU overlap with its work."""
        batch = replace(
            self,
            spans=self.spans.to(device),
            facts={name: to_device(values, device) for name, values in self.facts.items()},
            views=None if self.views is None else to_device(self.views, device),
        )
        vars(batch)["views_alike"] = self.views_alike  # on a GPU, `views` could not be read without waiting
        return batch


def position_ids(batch: AnyBatch, padding_index: int | None) -> Tensor:
    """`(1, T)` position of each packed token in its span.

    Args:
        batch: the spans.
        padding_index: None for positions from 0. Otherwise RoBERTa's rule: they count from padding_index + 1, and a
            token with this id (MLM may draw it as a replacement) has position padding_index and is not counted.
            Patches have positions from 0.
    """
    places = batch.table.places
    if padding_index is None or not isinstance(batch, SpanBatch):
        return places[None]
    counted = (batch.input_ids != padding_index).long()
    before = counted.cumsum(0) - counted
    starts = torch.arange(batch.num_tokens, device=batch.device) - places
    return ((before - before[starts] + 1) * counted + padding_index)[None]


def padding_mask(batch: AnyBatch) -> Tensor:
    """`(S, longest)` mask of the tokens of spans that are padded on the right."""
    return torch.arange(batch.longest, device=batch.device)[None, :] < batch.table.lengths[:, None]


def pad_rows(batch: SpanBatch, pad_id: int) -> tuple[Tensor, Tensor]:
    """The spans as `(S, longest)` ids with padding on the right, and the mask of real tokens."""
    return as_rows(batch.input_ids, batch, pad_id), padding_mask(batch)


def as_rows(values: Tensor, batch: AnyBatch, filling: int = 0) -> Tensor:
    """Values of a batch's tokens `(T, ...)` as rows `(S, longest, ...)`, padded on the right with `filling`."""
    rows = values.new_full((batch.num_spans * batch.longest, *values.shape[1:]), filling)
    rows[row_places(batch)] = values
    return rows.view(batch.num_spans, batch.longest, *values.shape[1:])


def row_places(batch: AnyBatch) -> Tensor:
    """`(T,)` place of each token among those of all rows that are padded on the right."""
    return batch.table.owners * batch.longest + batch.table.places


class Collator(Protocol):
    """Turns rows of the shards into the spans of a step; NumPy only, a pure function of its arguments.

    A collator may have an attribute `fetch` (trainer/data/chunks.py) for work that the tasks that read shards do.
    """

    def collate(self, rows: pa.Table, epochs: NDArray[np.int64]) -> RankBatch:
        """The batch of a worker, on the CPU.

        Args:
            rows: n rows of the shards.
            epochs: `(n,)` epoch in which each is read.
        """
