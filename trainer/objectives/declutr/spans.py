"""Documents to span batches: sample, cut, add specials, mask, pack. Numpy until the last line; no Ray, no state.

Anchor and positive spans are those of DeCLUTR section 3.2, as the released sampler computes them. Sampling has two
parts. `draw` turns keys into random numbers. `place` turns random numbers into spans and is deterministic, so that
recorded draws can be replayed. All spans are half-open [start, end) in tokens of the document, without special tokens.

If windows are longer than the longest span, an anchor may be anywhere in its window. Short documents (prepare's
`short_documents`) have fewer anchors, or windows and spans shorter than l_max; this depends only on the documents'
windows. A document that is long enough has the same spans in every mode.

Order of the spans of n documents: all anchors (document by document), then, if wanted, the same anchors unmasked, then
(unless only MLM is trained) all positives, document by document, anchor by anchor.

Legend: n documents, A anchors a document, P positives an anchor.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.data.batches import RankBatch, SpanBatch, pack_spans
from declutr.trainer.data.packing import Vocabulary, ranges
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Spans:
    """Spans of n documents."""

    anchors: I64  # `(n, A, 2)` starts and ends
    positives: I64  # `(n, A, P, 2)` starts and ends
    # `(n, A)` true for anchors that exist: all, or the first few in short documents. Other spans are 0.
    present: NDArray[np.bool_]
    queries: NDArray[np.bool_]  # `(n, A)` true for anchors that are as short as a query


@dataclass(frozen=True)
class Draws:
    """The random numbers that place the spans of n documents, all in [0, 1)."""

    windows: F64  # `(n, A)` uniforms that choose the anchors' windows
    anchor_lengths: F64  # `(n, A)` Beta(4, 2), or `anchor_beta` of the settings
    anchor_starts: F64  # `(n, A)` uniforms
    positive_lengths: F64  # `(n, A, P)` Beta(2, 4), or `positive_beta`
    positive_starts: F64  # `(n, A, P)` uniforms
    kinds: F64 | None = None  # `(n, A)` uniforms that choose the anchors that are queries; None: none is


def draw(config: SpanConfig, seed: int, epochs: I64, keys: seeding.U64, purpose: str = "spans") -> Draws:
    """Draws for documents with keys `(n,)` in epochs `(n,)`; the draws of anchor a do not depend on A."""
    num_documents, num_anchors, num_positives = len(keys), config.num_anchors, config.num_positives
    # Beta(a, b) with whole numbers is the law of the a-th smallest of a + b - 1 uniforms.
    (anchor_rank, anchor_b), (positive_rank, positive_b) = config.anchor_beta, config.positive_beta
    own, per_positive = anchor_rank + anchor_b - 1 + 2, positive_rank + positive_b - 1 + 1
    per_anchor = own + num_positives * per_positive
    drawn = seeding.words(seed, purpose, keys, epochs.astype(np.uint64), num_anchors * per_anchor)
    uniform = seeding.unit(drawn).reshape(num_documents, num_anchors, per_anchor)
    kinds = None
    if config.query_share:  # under a purpose of their own: other draws do not depend on the share
        kinds = seeding.unit(seeding.words(seed, f"{purpose}, kinds", keys, epochs.astype(np.uint64), num_anchors))
    positive = uniform[..., own:].reshape(num_documents, num_anchors, num_positives, per_positive)
    return Draws(
        windows=uniform[..., 0],
        anchor_starts=uniform[..., 1],
        anchor_lengths=np.sort(uniform[..., 2:own], axis=-1)[..., anchor_rank - 1],
        positive_starts=positive[..., 0],
        positive_lengths=np.sort(positive[..., 1:], axis=-1)[..., positive_rank - 1],
        kinds=kinds,
    )


def place(
    config: SpanConfig,  # geometry and strategy
    draws: Draws,  # the random numbers
    num_tokens: I64,  # `(n,)` lengths of the documents
    windows: I64,  # the documents' window starts, one after the other (the shards' `windows` column)
    window_offsets: I64,  # `(n + 1,)` place in `windows` of each document's first window
    short_documents: ShortDocuments = "drop",  # how the shards were prepared
) -> Spans:
    """Spans of n documents from their draws."""
    counts = _count_anchors(config, num_tokens, np.diff(window_offsets), short_documents)
    room = _rooms(config, windows, window_offsets, short_documents)[:, None]
    shortest, longest = config.min_tokens, np.minimum(room, config.max_tokens)
    chosen = _choose_windows(counts, draws.windows, windows, window_offsets)  # gaps of at least l_max, as released
    length, queries = _scale(draws.anchor_lengths, shortest, longest), np.zeros(chosen.shape, np.bool_)
    if draws.kinds is not None:
        queries = draws.kinds < config.query_share
        shortest_query, longest_query = config.query_tokens
        # of the share's uniforms, each divided by the share is uniform again
        of_query = _pick(draws.kinds / config.query_share, longest_query - shortest_query + 1)
        length = np.where(queries, shortest_query + of_query, length)
    start = chosen + _pick(draws.anchor_starts, room - length + 1)  # an anchor never crosses its window's end
    end = start + length

    start_, end_, longest_ = start[..., None], end[..., None], longest[..., None]
    total = num_tokens[:, None, None]
    if config.strategy == "subsuming":
        positive_length = _scale(draws.positive_lengths, shortest, length[..., None])
        low, high = start_, end_ - positive_length
        positive = low + _pick(draws.positive_starts, high - low + 1)
    elif config.strategy == "adjacent":
        limit = np.minimum(longest_, np.maximum(start_, total - end_))  # fits on one side at least
        positive_length = _scale(draws.positive_lengths, shortest, limit)
        # the released sampler has >: no positive starts at token 0
        left, right = start_ >= positive_length, end_ + positive_length <= total
        go_left = left & (~right | (draws.positive_starts < 0.5))
        positive = np.where(go_left, start_ - positive_length, end_)
    elif config.strategy == "distant":
        positive_length = _scale(draws.positive_lengths, shortest, longest_)
        before, behind = start_ - positive_length, total - end_ - positive_length  # largest distances on the two sides
        # Another whole window lies on one side of the anchor's, so one of the two is not negative.
        distance = np.minimum(config.min_distance_tokens, np.maximum(before, behind))
        num_before, num_behind = (np.maximum(0, side - distance + 1) for side in (before, behind))
        drawn = _pick(draws.positive_starts, num_before + num_behind)
        positive = np.where(drawn < num_before, drawn, end_ + distance + drawn - num_before)
    else:
        positive_length = _scale(draws.positive_lengths, shortest, longest_)
        # ends included: it may only touch
        low, high = np.maximum(0, start_ - positive_length), np.minimum(end_, total - positive_length)
        positive = low + _pick(draws.positive_starts, high - low + 1)
    if draws.kinds is not None:
        limit = np.minimum(longest_, np.maximum(start_, total - end_))  # fits on one side at least
        of_answer = _scale(draws.positive_lengths, np.minimum(shortest, limit), limit)
        fits_behind = end_ + of_answer <= total
        positive = np.where(queries[..., None], np.where(fits_behind, end_, start_ - of_answer), positive)
        positive_length = np.where(queries[..., None], of_answer, positive_length)
    present = np.arange(config.num_anchors) < counts[:, None]
    return Spans(
        anchors=np.stack([start, end], axis=-1) * present[..., None],
        positives=np.stack([positive, positive + positive_length], axis=-1) * present[..., None, None],
        present=present,
        queries=queries & present,
    )


def pair_lengths(
    config: SpanConfig, draws: Draws, windows: I64, window_offsets: I64, short_documents: ShortDocuments = "drop"
) -> tuple[I64, I64]:
    """Tokens of each document's first anchor and first positive, `(n,)` each, distributed as for all spans."""
    longest = np.minimum(_rooms(config, windows, window_offsets, short_documents), config.max_tokens)
    anchor = _scale(draws.anchor_lengths[:, 0], config.min_tokens, longest)
    return anchor, _scale(draws.positive_lengths[:, 0, 0], config.min_tokens, longest)


def _count_anchors(config: SpanConfig, num_tokens: I64, num_windows: I64, short_documents: ShortDocuments) -> I64:
    """Number of anchors of each document, `(n,)`: half its windows if those are fewer than 2 * A, else A."""
    num_anchors = config.num_anchors
    if short_documents == "drop" and len(num_tokens) and int(num_tokens.min()) < config.min_document_tokens:
        raise ValueError(
            f"a document of {int(num_tokens.min())} tokens is too short: num_anchors = {num_anchors} and max_tokens = "
            f"{config.max_tokens} need {config.min_document_tokens} tokens"
        )
    counts: I64 = np.minimum(num_anchors, num_windows // 2)
    min_anchors = 1 if short_documents == "fewer_anchors" else num_anchors
    if len(counts) and int(counts.min()) < min_anchors:
        few = int(counts.argmin())
        raise ValueError(
            f"a document of {num_tokens[few]} tokens is too short: its {num_windows[few]} windows have room for "
            f"{counts[few]} anchors; short_documents = {short_documents} needs room for {min_anchors}"
        )
    return counts


def _rooms(config: SpanConfig, windows: I64, offsets: I64, short_documents: ShortDocuments) -> I64:
    """Length of each document's windows, `(n,)`, in tokens: the longest span that the shards have room for, or more."""
    # only the windows tell how prepare treated a short document
    rooms: I64 = windows[offsets[:-1] + 1] - windows[offsets[:-1]]
    limit = config.min_tokens if short_documents == "shrink_spans" else config.max_tokens
    if len(rooms) and int(rooms.min()) < limit:
        key = "min_tokens" if short_documents == "shrink_spans" else "max_tokens"
        raise ValueError(
            f"a document has windows of {int(rooms.min())} tokens, too short for spans of {key} = {limit}; lower it, "
            f"or prepare the corpus again with a larger geometry.{key}"
        )
    return rooms


def _scale(beta: F64, low: int | I64, high: I64) -> I64:
    """int(Beta * (high - low) + low): with Beta below 1, `high` itself has probability 0, as in the released code."""
    return (beta * (high - low) + low).astype(np.int64)


def _pick(uniform: F64, count: int | I64) -> I64:
    """Uniform integers below `count`."""
    return (uniform * count).astype(np.int64)


def _choose_windows(num_anchors: I64, uniform: F64, windows: I64, offsets: I64) -> I64:
    """Start of each anchor's window, `(n, A)`; 0 beyond a document's `num_anchors`.

    Each choice removes the window and its neighbours from the list. If few windows are left for the remaining anchors,
    only the two ends of the list are eligible, so that every later anchor finds a window.
    """
    chosen = np.zeros(uniform.shape, np.int64)
    for document, (row, anchor_count) in enumerate(zip(uniform.tolist(), num_anchors.tolist(), strict=True)):
        starts = windows[offsets[document] : offsets[document + 1]]
        for anchor, u in enumerate(row[:anchor_count]):
            left, remaining = len(starts), anchor_count - anchor
            index = (0 if u < 0.5 else left - 1) if left // remaining < remaining else int(u * left)
            chosen[document, anchor] = starts[index]
            if remaining > 1:  # by pieces of an array: a document can have 100,000 windows
                starts = np.concatenate((starts[: max(0, index - 1)], starts[index + 2 :]))
    return chosen


@dataclass(frozen=True)
class SpanCollator:
    """Turns documents into the spans of a step."""

    config: DeclutrConfig  # settings of the objective: which losses need which spans, and the masks
    # seed, geometry and strategy of the spans, and the treatment of short documents when they were prepared.
    run: RunContext
    vocabulary: Vocabulary  # ids of the tokenizer
    max_content: int  # largest number of tokens of a span, without specials; longer spans are cut at the end

    def sample(self, documents: pa.Table, epochs: I64) -> Spans:
        """Spans of these shard rows in these epochs."""
        windows, offsets = ragged(documents.column("windows"))
        draws = draw(self.run.spans, self.run.seed, epochs, document_keys(documents))
        lengths = documents.column("num_tokens").to_numpy()
        return place(self.run.spans, draws, lengths, windows.astype(np.int64), offsets, self.run.short_documents)

    def collate(self, rows: pa.Table, epochs: I64) -> RankBatch:
        """The spans of n documents, with a row of views for each contrasted anchor (trainer/objectives/base.py)."""
        spans = self.sample(rows, epochs)
        contrasted = int(spans.present.sum()) if self.config.embeds else 0
        facts = {}
        if self.config.embeds and self.config.excludes_same_document:
            # facts are int64; no bit is lost
            owners = np.repeat(document_keys(rows).view(np.int64), spans.present.sum(axis=1))
            facts = {"document": torch.from_numpy(owners)}
        return RankBatch(self.pack(rows, epochs, spans), contrasted, facts)

    def pack(self, documents: pa.Table, epochs: I64, spans: Spans) -> SpanBatch:
        """Cuts, masks and packs spans that were drawn from these documents before."""
        config, run = self.config, self.run
        tokens, offsets = ragged(documents.column("tokens"))
        anchors, positives = spans.anchors[spans.present], spans.positives[spans.present].reshape(-1, 2)
        copies = [anchors] + [anchors] * config.unmasked_anchors + [positives] * config.embeds
        bounds = np.concatenate(copies)
        num_anchors = spans.present.sum(axis=1)  # absent anchors are not packed: they would be wasted work
        counts = [num_anchors] + [num_anchors] * config.unmasked_anchors
        counts += [num_anchors * run.spans.num_positives] * config.embeds
        document = np.concatenate([np.repeat(np.arange(len(epochs)), count) for count in counts])
        number = np.concatenate([ranges(count) for count in counts])  # within document and kind

        content = np.minimum(bounds[:, 1] - bounds[:, 0], self.max_content)  # the encoder's positions end there
        keys, read_in = document_keys(documents)[document], epochs[document].astype(np.uint64)
        kinds = np.repeat(np.arange(len(copies)), [len(part) for part in copies])
        masking = (config.masking, slice(len(anchors))) if config.mlm else None  # these anchors come first
        starts, numbers = offsets[document] + bounds[:, 0], number + (kinds << 16)  # copies drop independently
        queries = np.zeros(len(bounds), np.bool_)
        asked = np.tile(spans.queries[spans.present], 1 + config.unmasked_anchors)
        queries[: len(asked)] = asked  # anchors and their copies come first
        return pack_spans(
            tokens, starts, content, self.vocabulary, run.seed, keys, read_in, numbers, masking, queries=queries
        )
