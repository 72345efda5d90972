"""Spans as the encoder reads them: packed one after the other without padding, or padded for encoders that cannot pack.

Legend: S spans, T tokens of all spans together (specials included), K tokens that are selected for MLM.

Canonical microbatches make a forward the same for any number of workers: the global batch is cut into microbatches of a
fixed number of documents, a worker has whole ones, and each is packed alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from declutr.common.seeding import U64
from declutr.trainer.data.packedbatch import PackedBatch, digest_of, to_device
from declutr.trainer.data.packing import MaskingConfig, Vocabulary, dropout_words, mask_tokens, ranges

I64 = NDArray[np.int64]
IGNORED = -100  # the label that torch's cross entropy leaves out
_MASKED_TOKENS = 16384  # tokens masked at a time; their draws take a megabyte, and those of a batch hundreds
_MULTIPLIER = 0xD6E8FEB86659FD93  # odd, so that multiplication by its powers loses no bit


@dataclass(frozen=True)
class SpanBatch(PackedBatch):
    """Spans with their MLM targets, on one device."""

    by_token: ClassVar[tuple[str, ...]] = ("input_ids",)
    input_ids: Tensor  # `(T,)` tokens of the spans, specials included, some of them masked
    lengths: Tensor  # as of `PackedBatch`
    selected: Tensor  # `(K,)` places in `input_ids`, ascending, whose original token is to be predicted
    labels: Tensor  # `(K,)` the original tokens
    keys: Tensor | None = None  # as of `PackedBatch`
    rates: Tensor | None = None  # likewise

    @cached_property
    def chosen(self) -> list[int]:
        """S + 1 numbers: the selected tokens before each span, and all."""
        bounds = np.concatenate([[0], self.lengths.numpy().cumsum()])
        return np.searchsorted(self.selected.cpu().numpy(), bounds).tolist()  # `selected` is ascending

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """As `PackedBatch.moved`."""
        batch = super().moved(move)
        cached = {"chosen": self.chosen, "table": batch.table}  # on a GPU, `selected` could not be read without waiting
        batch = replace(batch, selected=move(self.selected), labels=move(self.labels))
        vars(batch).update(cached)
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

    def with_blank(self) -> Self:
        """As `PackedBatch.with_blank`; the last span's MLM label is ignored, so that it adds nothing to the loss."""
        selected = F.pad(self.selected, (0, 1), value=self.num_tokens)
        return replace(super().with_blank(), selected=selected, labels=F.pad(self.labels, (0, 1), value=IGNORED))

    def unselected(self) -> Self:
        """The batch without tokens to predict."""
        batch = replace(self, selected=self.selected[:0], labels=self.labels[:0])
        vars(batch)["table"] = self.table
        return batch

    def _slice(self, spans: tuple[int, int], tokens: tuple[int, int]) -> Self:
        picked = slice(self.chosen[spans[0]], self.chosen[spans[1]])
        part = super()._slice(spans, tokens)
        batch = replace(part, selected=self.selected[picked] - tokens[0], labels=self.labels[picked])
        vars(batch)["chosen"] = [count - picked.start for count in self.chosen[spans[0] : spans[1] + 1]]
        return batch


def pack_spans(
    tokens: NDArray[np.integer],  # tokens of all documents, one after the other
    sources: I64,  # `(S,)` place of each span's first token in `tokens`
    content: I64,  # `(S,)` tokens of each span, without specials
    vocabulary: Vocabulary,  # ids of the tokenizer
    seed: int,  # the run's seed
    keys: U64,  # `(S,)` key of each span's document
    epochs: U64,  # `(S,)` epoch in which it is read
    # `(S,)` number of the span, unique among those of its document: spans with different numbers drop independently.
    numbers: I64,
    masking: tuple[MaskingConfig, slice] | None = None,  # settings of masking, and the spans to be masked for MLM
    rates: NDArray[np.float64] | None = None,  # as of `SpanBatch`
    # `(S,)` true for spans that have the prompt of queries; None: none has it.
    queries: NDArray[np.bool_] | None = None,
) -> SpanBatch:
    """Packs S spans in one row, with their specials, masks and dropout keys."""
    asked, own = np.zeros(len(content), np.bool_), vocabulary.query_prompt or ()
    if queries is not None and vocabulary.query_prompt is not None:
        asked = queries
    lengths = content + (vocabulary.bos is not None) + (vocabulary.eos is not None)
    lengths += np.where(asked, len(own), len(vocabulary.prompt))
    ends = np.cumsum(lengths)
    starts, ids = ends - lengths, np.empty(int(lengths.sum()), np.int64)
    if vocabulary.bos is not None:
        ids[starts] = vocabulary.bos
    if vocabulary.eos is not None:
        ids[ends - 1] = vocabulary.eos
    places = starts + (vocabulary.bos is not None)
    for prompt, prompted in (vocabulary.prompt, ~asked), (own, asked):
        for number in prompt:
            ids[places[prompted]] = number
            places = places + prompted
    # A slice per span: an index array per token would take longer and, for thousands of documents, much memory.
    for start, source, size in zip(places.tolist(), sources.tolist(), content.tolist(), strict=True):
        ids[start : start + size] = tokens[source : source + size]
    picked = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    if masking is not None:
        settings, part = masking
        blocks = (np.cumsum(content[part]) - content[part]) // _MASKED_TOKENS  # of a span's first token
        for some in np.split(np.arange(len(content))[part], np.flatnonzero(np.diff(blocks)) + 1):
            within, span = ranges(content[some]), np.repeat(some, content[some])
            place = places[span] + within
            original, owners = ids[place], (keys[span], epochs[span], numbers[span])
            ids[place], chosen = mask_tokens(settings, seed, vocabulary, original, *owners, within)
            picked.append((place[chosen], original[chosen]))
    selected, labels = (np.concatenate(parts) for parts in zip(*picked, strict=True))
    arrays = ids, lengths, selected, labels, dropout_words(seed, keys, epochs, numbers)
    batch = SpanBatch(*map(torch.from_numpy, arrays))
    return batch if rates is None else replace(batch, rates=torch.from_numpy(rates))


@dataclass(frozen=True)
class PatchBatch(PackedBatch):
    """Clips on one device: patches of images or spectrograms, F values each, and a CLS token before those of a clip.

    It has the interface of `SpanBatch`; nothing of it is predicted.
    """

    by_token: ClassVar[tuple[str, ...]] = ("places", "values")
    values: Tensor  # `(T, F)` values of the patches, uint8 pixels or float32; zero for a CLS token
    places: Tensor  # `(T,)` int64, 0 for a CLS token, else 1 + place of the patch in its clip
    lengths: Tensor  # as of `PackedBatch`
    keys: Tensor | None = None  # likewise
    rates: Tensor | None = None  # likewise

    @property
    def selected(self) -> Tensor:
        """No token is selected for MLM."""
        return self.places.new_empty(0)

    @property
    def labels(self) -> Tensor:
        """No token is predicted."""
        return self.places.new_empty(0)

    def digest(self) -> int:
        """A number below DIGEST that is determined by the clips, on the CPU; see `SpanBatch.digest`."""
        raw = np.ascontiguousarray(self.values.numpy()).view(np.uint8).reshape(self.num_tokens, -1)
        raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 8)))  # whole words of 8 bytes
        powers = np.cumprod(np.full(raw.shape[1] // 8, _MULTIPLIER, np.uint64))
        tokens = (raw.view(np.uint64) * powers).sum(axis=1) + self.places.numpy().astype(np.uint64)
        return digest_of(tokens + np.uint64(1), self.lengths, self.keys)


AnyBatch = SpanBatch | PatchBatch  # spans of tokens, or clips of patches


class CanonicalMicrobatch(NamedTuple):
    """A canonical microbatch (trainer/data/batches.py)."""

    number: int  # its number in the global batch
    num_spans: int  # its spans
    num_rows: int  # its rows of views


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of a task's batch in a step."""

    spans: AnyBatch  # packed spans of its documents
    # m, rows of views that the objective makes from the spans; 0 if the loss uses no embeddings, and for a rank without
    # documents.
    num_rows: int
    # `(m,)` int64 each, properties of a row that the loss needs in addition to its views, such as a label.
    facts: dict[str, Tensor] = field(default_factory=dict)
    digest: int = 0  # digest of the spans (SpanBatch.digest); 0 if it was not computed
    views: Tensor | None = None  # `(m, V)` int64, number of the span of each view. None: the objective knows the order.
    # canonical microbatches of which the spans are composed; empty if there are none.
    canonical: tuple[CanonicalMicrobatch, ...] = ()

    @cached_property
    def views_alike(self) -> bool:
        """True if all views of each row have the same dropout key, so that they cannot differ by dropout."""
        keys, rows = self.spans.keys, self.num_rows
        if keys is None or not rows or (self.views is None and len(keys) % rows):
            return False
        by_row = keys.view(rows, -1) if self.views is None else keys[self.views.cpu()]
        return bool((by_row == by_row[:, :1]).all())  # of SCD and SimCSE, an error that no loss shows

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


def position_ids(
    batch: AnyBatch,  # the spans
    # None for positions from 0. Otherwise RoBERTa's rule: they count from padding_index + 1, and a token with this id
    # (MLM may draw it as a replacement) has position padding_index and is not counted. Patches have positions from 0.
    padding_index: int | None,
) -> Tensor:
    """`(1, T)` position of each packed token in its span."""
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

    def collate(
        self,
        rows: pa.Table,  # n rows of the shards
        epochs: NDArray[np.int64],  # `(n,)` epoch in which each is read
    ) -> RankBatch:
        """The batch of a worker, on the CPU."""


def collated(
    collator: Collator,  # packs rows
    rows: pa.Table,  # n rows of the shards; of canonical microbatches whole ones of the global batch, each packed alone
    epochs: NDArray[np.int64],  # `(n,)` epoch in which each is read
    start: int,  # place of the first row in the global batch
    # documents of a canonical microbatch, of which the last may have fewer; None: the batch is packed as one.
    canonical_documents: int | None,
) -> RankBatch:
    """The batch of a worker with its digest."""
    if canonical_documents is None or not len(rows):  # no row: more workers than microbatches
        batch = collator.collate(rows, epochs)
        return replace(batch, digest=batch.spans.digest())
    places = range(0, len(rows), canonical_documents)
    parts = [
        collator.collate(rows.slice(at, canonical_documents), epochs[at : at + canonical_documents]) for at in places
    ]
    starts = np.cumsum([0, *(part.spans.num_spans for part in parts)])  # each part numbers its spans from 0
    views = [None if part.views is None else part.views + int(at) for part, at in zip(parts, starts, strict=False)]
    spans = _joined([part.spans for part in parts])
    return RankBatch(
        spans,
        sum(part.num_rows for part in parts),
        {name: torch.cat([part.facts[name] for part in parts]) for name in parts[0].facts},
        spans.digest(),
        views=_cat(views),
        canonical=tuple(
            CanonicalMicrobatch(number, part.spans.num_spans, part.num_rows)
            for number, part in enumerate(parts, start // canonical_documents)
        ),
    )


def canonical_microbatches(batch: RankBatch) -> list[RankBatch]:
    """The microbatches of a worker's batch as separate batches, without facts; a batch without microbatches is one."""
    if not batch.canonical:
        return [batch]
    bounds = np.cumsum([0, *(microbatch.num_spans for microbatch in batch.canonical)]).tolist()
    rows = np.cumsum([0, *(microbatch.num_rows for microbatch in batch.canonical)]).tolist()
    spans: list[AnyBatch] = list(batch.spans.slices(list(pairwise(bounds))))
    return [
        replace(
            batch,
            spans=part,
            num_rows=microbatch.num_rows,
            facts={},
            views=None if batch.views is None else batch.views[row : row + microbatch.num_rows] - bound,
            canonical=(microbatch,),
        )
        for microbatch, part, bound, row in zip(batch.canonical, spans, bounds, rows, strict=False)
    ]


def _joined(parts: Sequence[AnyBatch]) -> AnyBatch:
    """The spans of several batches, one after the other."""
    tokens = np.cumsum([0, *(part.num_tokens for part in parts)]).tolist()
    values: dict[str, Any] = {field.name: [getattr(part, field.name) for part in parts] for field in fields(parts[0])}
    if "selected" in values:
        values["selected"] = [places + at for places, at in zip(values["selected"], tokens, strict=False)]
    joined: dict[str, Any] = {name: _cat(tensors) for name, tensors in values.items()}
    return type(parts[0])(**joined)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors one after the other; None if they are missing."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None
