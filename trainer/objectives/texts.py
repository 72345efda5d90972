"""Objectives over short texts: texts of shard rows, spans made of them, their held-out scores; SCD and SCL.

SCD pushes two dropout views of a sentence apart, and correlates their projections dimension by dimension. SCL
classifies premise and hypothesis, and contrasts premises with hypotheses. trainer/objectives/simcse.py has SimCSE.

Legend: n rows of the shards on this worker, X their texts, S spans, N held-out rows, M rows or pairs of the global
batch, A anchors, D and H embedding size, P size of the projections.
"""

from abc import abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from declutr.common import seeding
from declutr.pipeline.shards.content import ENTAILMENT, LABELS
from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.trainer.data.batches import RankBatch, SpanBatch, pack_spans
from declutr.trainer.data.packing import MaskingConfig, Vocabulary
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import Gathered, HeldOutSplit, Objective
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.scores import (
    alignment,
    by_size,
    effective_rank,
    embed_together,
    held_out_rows,
    retrieval,
    uniformity,
)
from declutr.trainer.objectives.text_config import Limit, ScdConfig, SclConfig, TextObjectiveConfig

I64 = NDArray[np.int64]


class Texts:
    """The texts of rows that hold sentences, pairs or triples."""

    def __init__(self, rows: pa.Table) -> None:
        self.tokens, offsets = ragged(rows.column("tokens"))  # of all texts, one after the other
        starts, bounds = ragged(rows.column("starts"))
        labels, _ = ragged(rows.column("labels"))
        part = slice(*bounds[[0, -1]])  # the table may be a slice of a larger one
        self.rows = np.repeat(np.arange(len(rows)), np.diff(bounds))  # `(X,)` row of each text
        self.starts = offsets[self.rows] + starts[part]  # `(X,)` place of each text's first token in `tokens`
        self.sizes = np.diff(np.append(self.starts, offsets[-1:]))  # `(X,)` tokens of each text, without specials
        self.labels = labels[part].astype(np.int64)  # `(X,)` label of each text (pipeline/shards/content.py)
        self.first = bounds[:-1] - bounds[0]  # `(n,)` number of each row's first text: the sentence or premise
        self.keys = document_keys(rows)  # `(n,)` uint64 key of each row


@dataclass(frozen=True)
class TextCollator:
    """Packs texts as spans, those of rows as their objective does."""

    objective: "TextObjective[Any]"  # the objective
    vocabulary: Vocabulary  # ids of the shards' tokenizer
    max_content: int  # largest number of tokens of a span, without specials; longer texts are cut at the end

    def collate(self, rows: pa.Table, epochs: I64) -> RankBatch:
        """The spans of n rows."""
        return self.objective.batch(Texts(rows), epochs, self)

    def pack(
        self,
        texts: Texts,  # texts of n rows
        chosen: I64,  # `(S,)` numbers of texts; a text may occur several times
        numbers: I64,  # as of `pack_spans`
        epochs: I64,  # `(n,)` epoch in which each row is read
        rates: NDArray[np.float64] | None = None,  # as of `pack_spans`
        masking: tuple[MaskingConfig, slice] | None = None,  # likewise
        queries: NDArray[np.bool_] | None = None,  # likewise
    ) -> SpanBatch:
        """The chosen texts, in this order."""
        content = np.minimum(texts.sizes[chosen], self.max_content)  # the papers cut at 32 tokens with specials
        rows = texts.rows[chosen]
        owners = texts.keys[rows], epochs[rows].astype(np.uint64), numbers
        starts, seed = texts.starts[chosen], self.objective.run.seed
        return pack_spans(texts.tokens, starts, content, self.vocabulary, seed, *owners, masking, rates, queries)


def text_keys(texts: Texts, chosen: I64) -> I64:
    """`(S,)` int64 keys of texts, which depend on the row and on the place of the text in it."""
    within = (chosen - texts.first[texts.rows[chosen]]).astype(np.uint64)
    drawn = seeding.blocks(0, "text", texts.keys[texts.rows[chosen]], within, np.zeros_like(within))
    return np.ascontiguousarray(drawn[:, :2]).view(np.int64).reshape(-1)


def premise_keys(texts: Texts) -> I64:
    """`(n,)` int64 hashes of the tokens of each row's first text: equal for equal premises of different rows."""
    starts, sizes = texts.starts[texts.first], texts.sizes[texts.first]
    parts = [texts.tokens[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    digests = b"".join(blake2b(part.tobytes(), digest_size=8).digest() for part in parts)
    return np.frombuffer(digests, "<i8").astype(np.int64)


def draw_labelled(texts: Texts, label: int, seed: int, epochs: I64) -> I64:
    """`(n,)` number of one text with this label in each row, uniformly drawn by row and epoch."""
    having = np.flatnonzero(texts.labels == label)
    counts = np.bincount(texts.rows[having], minlength=len(texts.first))
    if len(counts) and not counts.all():
        raise ValueError(f"{int((counts == 0).sum())} rows have no text with the label {label}")
    zero = np.zeros(len(counts), np.uint64)
    drawn = seeding.blocks(seed, f"label {label}", texts.keys, epochs.astype(np.uint64), zero)[:, 0]
    picked = (seeding.unit(drawn) * counts).astype(np.int64)  # of the row's texts with the label
    return having[np.cumsum(counts) - counts + picked]


@dataclass(frozen=True)
class TextValidator:
    """Scores an encoder on held-out texts, shared among the workers.

    Sentences have no pairs, so only uniformity and effective rank are computed. Of other rows, the premise must find
    its first entailed hypothesis; rows without one are left out of the retrieval.
    """

    collator: TextCollator  # packs texts; its objective has the layers behind the pooling, and the sizes to score
    held_out: HeldOutSplit  # the held-out split
    rows: NDArray[np.int64]  # `(N,)` numbers of the rows to score

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The scores by name; None if embeddings are not finite."""
        objective = self.collator.objective
        texts = Texts(self.held_out.shards.take(self.rows))
        entailed = np.flatnonzero(texts.labels == ENTAILMENT)
        having, places = np.unique(texts.rows[entailed], return_index=True)  # the first entailed one of each row
        chosen = np.concatenate([texts.first, entailed[places]])
        epochs, numbers = np.zeros(len(texts.first), np.int64), np.zeros(len(chosen), np.int64)
        queries = np.isin(chosen, texts.first) & objective.config.asks
        embeddings = embed_together(
            encoder,
            len(chosen),
            lambda part: self.collator.pack(texts, chosen[part], numbers[part], epochs, queries=queries[part]),
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


class Scd(TextObjective[ScdConfig]):
    """Repulsion and decorrelation over `(M, 2, D)` views."""

    def __init__(self, config: ScdConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        layers: list[nn.Module] = []
        width = embedding_size
        for number, size in enumerate(config.projector):
            if number:
                layers += [nn.BatchNorm1d(width), nn.ReLU()]
            layers.append(linear := nn.Linear(width, size, bias=number == 0))  # biases as released
            if config.initializer_range is not None:
                nn.init.normal_(linear.weight, std=config.initializer_range)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            width = size
        self.projector = nn.Sequential(*layers)
        self.normalise = nn.BatchNorm1d(width, affine=False)  # then the products are Pearson correlations

    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """Each sentence twice, with the two pairs of rates."""
        count, config = len(texts.first), self.config
        rates = [config.dropout_rates, config.attention_dropout_rates or config.dropout_rates]
        numbers = np.tile([0, 1], count)  # one key with two rates would nest the masks of the views
        by_view = np.array(rates, np.float64).T  # of hidden states and attention weights
        return RankBatch(collator.pack(texts, np.repeat(texts.first, 2), numbers, epochs, by_view[numbers]), count)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """The two terms (SCD eq. 1 to 4, as the released code computes them)."""
        config = self.config
        with torch.autocast(batch.views.device.type, enabled=False):  # in at least float32, whatever the forward's type
            first, second = batch.views.unbind(1)
            cosine = F.cosine_similarity(first, second, dim=-1).mean()
            # of the global batch; released: local sums / global M
            correlation = self._projected(first).T @ self._projected(second) / len(batch.views)
            own = correlation.diagonal()
            on = (own - 1).square().sum()
            off = correlation.square().sum() - own.square().sum()
            return {
                "repulsion": config.repulsion_weight * cosine / config.temperature,
                "decorrelation": config.decorrelation_weight * (on + config.off_diagonal_weight * off),
            }

    def _projected(self, views: Tensor) -> Tensor:
        """`(M, P)` projections with mean 0 and variance 1 over the global batch, from `(M, D)`."""
        return self.normalise(self.projector(views))


def contrast(
    batch: Gathered,  # `(M, 2, H)` views, and the facts `label`, `premise` (key) and `hypothesis` (key)
    config: SclConfig,  # temperature and numbers of positives and negatives
) -> Tensor:
    """Mean over anchors of the mean over their positives p of -log(exp(s_p) / sum_k exp(s_k)), s = u . v / t.

    It is 0 without an anchor. The sum is over the anchor's positives and negatives. An anchor is the premise of an
    entailment pair. Its positives are the hypotheses of all entailment pairs with this premise; its negatives all other
    hypotheses of the batch.
    """
    premises, hypotheses = batch.views.unbind(1)
    entailed = batch.facts["label"] == ENTAILMENT
    anchors = entailed.nonzero().squeeze(1)
    if len(anchors) == 0:
        return batch.views.sum() * 0  # a loss with a gradient, where the released code divides by zero
    scores = premises[anchors] @ hypotheses.T / config.temperature  # no cosines, as released
    # equal texts, of whatever row: a file may group a premise twice
    same = batch.facts["premise"][anchors, None] == batch.facts["premise"][None]
    positive = same & entailed  # its neutral and contradicting hypotheses stay negatives
    negative = ~positive
    if (config.positives, config.negatives) != ("all", "all"):
        drawn = _priorities(batch, anchors)
        positive = _lowest(positive, config.positives, drawn.scatter(1, anchors[:, None], -1))  # its own first
        negative = _lowest(negative, config.negatives, drawn)  # the released code ignores the number
    log_sums = scores.masked_fill(~(positive | negative), -torch.inf).logsumexp(dim=1)
    terms = (log_sums[:, None] - scores).masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1)
    return terms.mean()


def _lowest(candidates: Tensor, limit: Limit, priorities: Tensor) -> Tensor:
    """The candidates with the lowest priorities of each row, at most `limit`; `(A, M)` booleans."""
    if limit == "all" or limit >= candidates.shape[1]:
        return candidates
    kept = priorities.masked_fill(~candidates, torch.iinfo(priorities.dtype).max).topk(limit, dim=1, largest=False)
    return candidates & torch.zeros_like(candidates).scatter(1, kept.indices, True)


def _priorities(batch: Gathered, anchors: Tensor) -> Tensor:
    """`(A, M)` random int64 from 0 that depend on the step and the keys of anchor and hypothesis alone."""
    keys = batch.facts["hypothesis"].cpu().numpy().view(np.uint64)
    steps = np.full(len(keys), batch.step, np.uint64)
    drawn = seeding.blocks(batch.seed, "scl", keys, steps, np.zeros_like(steps)).astype(np.int64)
    words = torch.from_numpy(drawn).to(anchors.device)
    mixed = words[anchors, 0, None] ^ words[None, :, 1]
    for multiplier in (0x7FEB352D, 0x846CA68B):  # the mix of trainer/data/packedbatch.py, here in int64
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


class Scl(TextObjective[SclConfig]):
    """Cross entropy and supervised contrast over `(M, 2, H)` views: premise u and hypothesis v of each pair."""

    def __init__(self, config: SclConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.classifier = nn.Sequential(
            # no activation between them, as released
            nn.Linear(3 * embedding_size, 3 * embedding_size // 2),
            nn.Linear(3 * embedding_size // 2, len(LABELS)),
        )

    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """Every text once; a pair's views are the spans of its premise and its hypothesis, its facts label and keys."""
        every = np.arange(len(texts.rows))
        premises = texts.first[texts.rows]
        spans = collator.pack(texts, every, every - premises, epochs)  # a premise of k pairs is encoded once
        hypotheses = np.flatnonzero(every != premises)
        facts = {
            "label": texts.labels[hypotheses],
            "premise": premise_keys(texts)[texts.rows[hypotheses]],
            "hypothesis": text_keys(texts, hypotheses),
        }
        return RankBatch(
            spans,
            len(hypotheses),
            {name: torch.from_numpy(values) for name, values in facts.items()},
            views=torch.from_numpy(np.stack([premises[hypotheses], hypotheses], axis=1)),
        )

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """(1 - lambda) cross entropy on (u, v, |u - v|), and lambda times the contrast of raw dot products."""
        config = self.config
        with torch.autocast(batch.views.device.type, enabled=False):
            premises, hypotheses = batch.views.unbind(1)
            terms = {}
            if config.contrastive_weight < 1:
                features = torch.cat([premises, hypotheses, (premises - hypotheses).abs()], dim=-1)
                cross_entropy = F.cross_entropy(self.classifier(features), batch.facts["label"])
                terms["classification"] = (1 - config.contrastive_weight) * cross_entropy
            if config.contrastive_weight > 0:
                terms["contrastive"] = config.contrastive_weight * contrast(batch, config)
            return terms
