"""Texts of shard rows, and spans made of them. NumPy until the last line; no Ray, no state.

Legend: n rows of the shards, X their texts, S spans.
"""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.data.packing import Vocabulary, dropout_words, pack
from declutr.trainer.objectives.masking import MaskingConfig, mask_spans

I64 = NDArray[np.int64]


class Texts:
    """The texts of rows that hold sentences, pairs or triples.

    Attributes:
        tokens: tokens of all texts, one after the other.
        starts: `(X,)` place of each text's first token in `tokens`.
        sizes: `(X,)` tokens of each text, without specials.
        labels: `(X,)` label of each text (pipeline/shards/content.py).
        rows: `(X,)` row of each text.
        first: `(n,)` number of each row's first text: the sentence or premise.
        keys: `(n,)` uint64 key of each row.
    """

    def __init__(self, rows: pa.Table) -> None:
        self.tokens, offsets = ragged(rows.column("tokens"))
        starts, bounds = ragged(rows.column("starts"))
        labels, _ = ragged(rows.column("labels"))
        part = slice(*bounds[[0, -1]])  # the table may be a slice of a larger one
        self.rows = np.repeat(np.arange(len(rows)), np.diff(bounds))
        self.starts = offsets[self.rows] + starts[part]
        self.sizes = np.diff(np.append(self.starts, offsets[-1:]))
        self.labels = labels[part].astype(np.int64)
        self.first = bounds[:-1] - bounds[0]
        self.keys = document_keys(rows)


@dataclass(frozen=True)
class TextPacker:
    """Packs texts as spans.

    Attributes:
        vocabulary: ids of the shards' tokenizer.
        max_content: largest number of tokens of a span, without specials; longer texts are cut at the end.
        seed: the run's seed.
    """

    vocabulary: Vocabulary
    max_content: int
    seed: int

    def pack(
        self,
        texts: Texts,
        chosen: I64,
        numbers: I64,
        epochs: I64,
        rates: NDArray[np.float64] | None = None,
        masking: tuple[MaskingConfig, slice] | None = None,
    ) -> SpanBatch:
        """The chosen texts, in this order.

        Args:
            texts: texts of n rows.
            chosen: `(S,)` numbers of texts; a text may occur several times.
            numbers: `(S,)` number of each span, unique among those of its row: spans with different numbers drop
                independently.
            epochs: `(n,)` epoch in which each row is read.
            rates: `(S, 2)` dropout rates of hidden states and attention weights; None: those of the encoder.
            masking: settings of masking, and the spans to be masked for MLM.
        """
        content = np.minimum(texts.sizes[chosen], self.max_content)
        packed = pack(texts.tokens, texts.starts[chosen], content, self.vocabulary)
        rows = texts.rows[chosen]
        keys, read_in = texts.keys[rows], epochs[rows].astype(np.uint64)
        selected = labels = np.empty(0, np.int64)
        if masking is not None:
            settings, part = masking
            owners = keys[part], read_in[part], numbers[part]
            selected, labels = mask_spans(
                settings, self.seed, self.vocabulary, packed.ids, packed.places[part], content[part], *owners
            )
        words = dropout_words(self.seed, keys, read_in, numbers)
        return SpanBatch(
            torch.from_numpy(packed.ids),
            torch.from_numpy(packed.lengths),
            torch.from_numpy(selected),
            torch.from_numpy(labels),
            torch.from_numpy(words),
            None if rates is None else torch.from_numpy(rates),
        )


def text_keys(texts: Texts, chosen: I64) -> I64:
    """`(S,)` int64 keys of texts, which depend on the row and on the place of the text in it."""
    within = (chosen - texts.first[texts.rows[chosen]]).astype(np.uint64)
    drawn = seeding.blocks(0, "text", texts.keys[texts.rows[chosen]], within, np.zeros_like(within))
    keys: I64 = np.ascontiguousarray(drawn[:, :2]).view(np.int64).reshape(-1)
    return keys


def premise_keys(texts: Texts) -> I64:
    """`(n,)` int64 hashes of the tokens of each row's first text: equal for equal premises of different rows."""
    starts, sizes = texts.starts[texts.first], texts.sizes[texts.first]
    parts = [texts.tokens[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    digests = b"".join(blake2b(part.tobytes(), digest_size=8).digest() for part in parts)
    return np.frombuffer(digests, "<i8").astype(np.int64)


def draw_labelled(texts: Texts, label: int, seed: int, epochs: I64) -> I64:
    """`(n,)` number of one text with this label in each row, uniformly drawn by row and epoch.

    Raises:
        ValueError: a row has no text with the label.
    """
    having = np.flatnonzero(texts.labels == label)
    counts = np.bincount(texts.rows[having], minlength=len(texts.first))
    if len(counts) and not counts.all():
        raise ValueError(f"{int((counts == 0).sum())} rows have no text with the label {label}")
    zero = np.zeros(len(counts), np.uint64)
    drawn = seeding.blocks(seed, f"label {label}", texts.keys, epochs.astype(np.uint64), zero)[:, 0]
    picked = (seeding.unit(drawn) * counts).astype(np.int64)
    chosen: I64 = having[np.cumsum(counts) - counts + picked]
    return chosen
