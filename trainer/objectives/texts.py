"""Base of the objectives over short texts: texts of shard rows, spans made of them, and their held-out scores.

Legend: n rows of the shards, X their texts, S spans, N held-out rows, H embedding size.
"""

from abc import abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.shards.content import ENTAILMENT
from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.trainer.data.batches import RankBatch, SpanBatch, pack_spans
from declutr.trainer.data.packing import MaskingConfig, Vocabulary
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import HeldOutSplit, Objective
from declutr.trainer.objectives.scores import (
    alignment,
    by_size,
    effective_rank,
    embed_together,
    held_out_rows,
    retrieval,
    uniformity,
)
from declutr.trainer.objectives.text_config import TextObjectiveConfig

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
class TextCollator:
    """Packs texts as spans, those of rows as their objective does.

    Attributes:
        objective: the objective.
        vocabulary: ids of the shards' tokenizer.
        max_content: largest number of tokens of a span, without specials; longer texts are cut at the end.
    """

    objective: "TextObjective[Any]"
    vocabulary: Vocabulary
    max_content: int

    def collate(self, rows: pa.Table, epochs: I64) -> RankBatch:
        """The spans of n rows."""
        return self.objective.batch(Texts(rows), epochs, self)

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
            numbers: as of `pack_spans`.
            epochs: `(n,)` epoch in which each row is read.
            rates: as of `pack_spans`.
            masking: likewise.
        """
        content = np.minimum(texts.sizes[chosen], self.max_content)  # the papers cut at 32 tokens with specials
        rows = texts.rows[chosen]
        owners = texts.keys[rows], epochs[rows].astype(np.uint64), numbers
        starts, seed = texts.starts[chosen], self.objective.run.seed
        return pack_spans(texts.tokens, starts, content, self.vocabulary, seed, *owners, masking, rates)


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
    picked = (seeding.unit(drawn) * counts).astype(np.int64)  # of the row's texts with the label
    chosen: I64 = having[np.cumsum(counts) - counts + picked]
    return chosen


@dataclass(frozen=True)
class TextValidator:
    """Scores an encoder on held-out texts, shared among the workers.

    Sentences have no pairs, so only uniformity and effective rank are computed. Of other rows, the premise must find
    its first entailed hypothesis; rows without one are left out of the retrieval.

    Attributes:
        collator: packs texts; its objective has the layers behind the pooling, and the sizes to score.
        held_out: the held-out split.
        rows: `(N,)` numbers of the rows to score.
    """

    collator: TextCollator
    held_out: HeldOutSplit
    rows: NDArray[np.int64]

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The scores by name; None if embeddings are not finite."""
        objective = self.collator.objective
        texts = Texts(self.held_out.shards.take(self.rows))
        entailed = np.flatnonzero(texts.labels == ENTAILMENT)
        having, places = np.unique(texts.rows[entailed], return_index=True)  # the first entailed one of each row
        chosen = np.concatenate([texts.first, entailed[places]])
        epochs, numbers = np.zeros(len(texts.first), np.int64), np.zeros(len(chosen), np.int64)
        embeddings = embed_together(
            encoder,
            len(chosen),
            lambda part: self.collator.pack(texts, chosen[part], numbers[part], epochs),
            objective.exported(),
            self.held_out.comm,
            self.held_out.device,
        )
        if not bool(embeddings.isfinite().all()):
            return None

        def scores(size: int | None) -> dict[str, float]:
            first, positives = embeddings[:, :size].tensor_split([len(texts.first)])
            scores = {"uniformity": uniformity(first), "effective_rank": effective_rank(first)}
            if len(positives) < 2:  # a retrieval among one is always right
                return scores
            anchors = first[torch.from_numpy(having)]
            ranked = retrieval(anchors, positives, texts.keys[having])
            return {**ranked, "alignment": alignment(anchors, positives), **scores}

        return by_size(objective.sizes, scores)


TextConfig = TypeVar("TextConfig", bound=TextObjectiveConfig)


class TextObjective(Objective[TextConfig]):
    """A loss over sentences, pairs or triples."""

    @abstractmethod
    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """The spans of the texts of n rows, read in the epochs `(n,)`."""

    def collator(self, vocabulary: Vocabulary, max_content: int) -> TextCollator:
        """Builds the collator of texts of at most `max_tokens` tokens, specials included."""
        return TextCollator(self, vocabulary, min(max_content, self.config.max_tokens - vocabulary.num_specials))

    def validator(self, held_out: HeldOutSplit) -> TextValidator:
        """Builds the validator of held-out texts: retrieval for pairs and triples, and the spread of embeddings."""
        rows = held_out_rows(held_out.shards, held_out.max_documents, self.run.seed)
        return TextValidator(self.collator(held_out.vocabulary, held_out.max_content), held_out, rows)
