"""DeCLUTR: contrasts spans of the same document with all others, and predicts masked tokens of the anchors.

Legend: n documents on this rank, m their anchors (n * A, or fewer if documents are short), A anchors a document, P
positives an anchor, M = anchors of the global batch, D size.

Held-out scores of an encoder: same-document span retrieval, alignment, uniformity, effective rank.

Retrieval is scored twice: between spans that touch, and between distant ones (trainer/objectives/declutr/objective.py).
Legend: N held-out documents, H embedding size.

Pairs of spans of one document that are far from each other, for the held-out scores (decision 19). Numpy only.

Like other spans, they are drawn by key and placed deterministically (trainer/objectives/declutr/spans.py). Legend: n
documents.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from declutr.common.seeding import U64
from declutr.pipeline.shards.shards import ShardSet, document_keys, ragged
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import Gathered, Objective
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig, NTXentConfig
from declutr.trainer.objectives.declutr.ntxent import MetricLearningLoss, ntxent
from declutr.trainer.objectives.declutr.spans import I64, Draws, Spans, draw, pair_lengths
from declutr.trainer.objectives.held_out import HELD_OUT_EPOCH, compute_together, held_out_rows
from declutr.trainer.objectives.measures import alignment, by_size, effective_rank, retrieval, uniformity
from declutr.trainer.parallel.communicator import Communicator

DISTANT = "distant spans"
"""Purpose under which the random numbers of distant spans are drawn."""


def place_distant(
    draws: Draws, num_tokens: I64, lengths: tuple[I64, I64], distance: int
) -> tuple[Spans, NDArray[np.bool_]]:
    """Places an anchor and a positive in each document, with at least `distance` tokens between them.

    The remaining tokens are distributed at random before, between and after the two spans, and their order is random
    too. If a document is too short for the distance, one span starts the document and the other ends it.

    Args:
        draws: the random numbers.
        num_tokens: `(n,)` lengths of the documents.
        lengths: `(n,)` tokens of the anchors and `(n,)` of the positives; each document has room for both.
        distance: wanted number of tokens between the two.

    Returns:
        The spans, one anchor and one positive a document, and `(n,)` true where the distance is reached.
    """
    anchor, positive = lengths
    room = num_tokens - anchor - positive
    between = np.minimum(distance, room)
    places = room - between + 1
    anchor_draw, positive_draw = draws.anchor_starts[:, 0], draws.positive_starts[:, 0, 0]
    anchor_start, positive_start = ((drawn * places).astype(np.int64) for drawn in (anchor_draw, positive_draw))
    first = anchor_draw < positive_draw  # then the anchor's start is not after the positive's
    anchor_start += np.where(first, 0, positive + between)
    positive_start += np.where(first, anchor + between, 0)
    spans = Spans(
        anchors=np.stack([anchor_start, anchor_start + anchor], axis=-1)[:, None],
        positives=np.stack([positive_start, positive_start + positive], axis=-1)[:, None, None],
        present=np.ones((len(num_tokens), 1), np.bool_),
    )
    return spans, room >= distance


class HeldOut(NamedTuple):
    """Embeddings of the held-out documents' spans, each `(N, H)` in float64 on the CPU.

    Attributes:
        anchors: one span of each document.
        positives: the span that touches it.
        distant_anchors: another span of each document.
        distant_positives: the span far from that one.
        reached: `(N,)` 1 where the distant pair has the wanted distance, 0 where the document is too short for it.
    """

    anchors: Tensor
    positives: Tensor
    distant_anchors: Tensor
    distant_positives: Tensor
    reached: Tensor

    @property
    def finite(self) -> bool:
        """True if all numbers are finite."""
        return all(bool(numbers.isfinite().all()) for numbers in self)

    def scores(self, keys: U64, size: int | None = None) -> dict[str, float]:
        """The scores of the first `size` numbers of all embeddings; None: of whole ones.

        `keys` are the `(N,)` keys of the documents.
        """
        anchors, positives, first, second = (table[:, :size] for table in self[:4])
        return {
            **retrieval(anchors, positives, keys),
            **{f"distant_{name}": value for name, value in retrieval(first, second, keys).items()},
            "alignment": alignment(anchors, positives),
            "uniformity": uniformity(anchors),
            "effective_rank": effective_rank(anchors),
        }


@dataclass(frozen=True)
class SpanValidator:
    """Scores an encoder on held-out documents, shared among the workers.

    Attributes:
        collator: draws one anchor and one touching positive from each document.
        shards: the held-out split.
        rows: `(N,)` rows of the documents to score.
        comm: the workers.
        device: device of the encoder.
        chunk_documents: number of documents in one forward.
        sizes: smaller sizes of the embedding to score too.
    """

    collator: SpanCollator
    shards: ShardSet
    rows: np.ndarray
    comm: Communicator
    device: torch.device
    chunk_documents: int = 64
    sizes: tuple[int, ...] = ()

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """All held-out scores; None if embeddings are not finite.

        `distant_share` is the share of documents whose distant spans are far enough apart.
        """
        held_out = self.embed(encoder)
        if not held_out.finite:
            return None
        keys = document_keys(self.shards.take(self.rows))
        scores = by_size(self.sizes, lambda size: held_out.scores(keys, size))
        return scores | {"distant_share": float(held_out.reached.mean())}

    def embed(self, encoder: Encoder) -> HeldOut:
        """Pooled embeddings as exported, on every worker: without projection, masks and dropout."""

        def rows_of(part: slice) -> Tensor:
            return self._embed(encoder, self.shards.take(self.rows[part]))

        width = 4 * encoder.output_size + 1
        table = compute_together(encoder, len(self.rows), width, rows_of, self.comm, self.device, self.chunk_documents)
        *pairs, reached = table.split([encoder.output_size] * 4 + [1], dim=1)
        return HeldOut._make([*pairs, reached.squeeze(1)])

    def _embed(self, encoder: Encoder, documents: pa.Table) -> Tensor:
        """`(n, 4 H + 1)`: the rows of `HeldOut`. Two separate forwards need only the memory of one."""
        epochs = np.full(len(documents), HELD_OUT_EPOCH, np.int64)
        distant, reached = self.sample_distant(documents)
        batches = self.collator.batch(documents, epochs), self.collator.pack(documents, epochs, distant)
        pairs = [encoder.embed(batch.to(self.device)).view(2, len(documents), encoder.output_size) for batch in batches]
        far = torch.from_numpy(reached).to(pairs[0])[:, None]
        return torch.cat([*pairs[0], *pairs[1], far], dim=1)

    def sample_distant(self, documents: pa.Table) -> tuple[Spans, NDArray[np.bool_]]:
        """Distant spans of these documents, and `(n,)` true where they are far enough apart."""
        collator = self.collator
        windows, offsets = ragged(documents.column("windows"))
        draws = draw(
            collator.spans, collator.seed, np.zeros(len(documents), np.int64), document_keys(documents), DISTANT
        )
        lengths = pair_lengths(collator.spans, draws, windows.astype(np.int64), offsets, collator.short_documents)
        return place_distant(draws, documents.column("num_tokens").to_numpy(), lengths, collator.spans.max_tokens)


class Declutr(Objective[DeclutrConfig]):
    """The contrastive loss over `(M, 2, D)` views, each an anchor and the mean of its positives.

    Raises:
        ValueError: a loss of pytorch-metric-learning rejects its arguments.
    """

    def __init__(self, config: DeclutrConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.queue: Tensor | None = None
        self.queue_documents: Tensor | None = None
        self.remembers = config.queue_size > 0
        self._metric_loss = None
        if isinstance(config.loss, MetricLearningConfig):
            self._metric_loss = MetricLearningLoss(**config.loss.model_dump(exclude={"kind"}))
        self.shards_rows = self._metric_loss is None

    def collator(self, vocabulary: Vocabulary, max_content: int) -> SpanCollator:
        """Builds the collator that draws, masks and packs the spans of documents."""
        return SpanCollator(
            spans=self.run.spans,
            masking=self.config.masking if self.config.mlm else None,
            unmasked_anchors=self.config.unmasked_anchors,
            include_positives=self.config.contrastive,
            max_content=max_content,
            vocabulary=vocabulary,
            seed=self.run.seed,
            short_documents=self.run.short_documents,
            names_documents=self.config.contrastive and self.config.excludes_same_document,
        )

    def views(self, embeddings: Tensor, batch: RankBatch) -> Tensor:
        """`(m, 2, D)`: each anchor and its positives' mean (paper section 3.1), from `(S, D)` in the collator's order.

        Raises:
            ValueError: the number of spans does not match the anchors and their positives.
        """
        rows, spans_a_row = batch.num_rows, 1 + self.config.unmasked_anchors + self.run.spans.num_positives
        if len(embeddings) != rows * spans_a_row:
            raise ValueError(f"{len(embeddings)} spans do not match {rows} anchors with {spans_a_row} spans each")
        masked, rest = embeddings[:rows], embeddings[rows:]
        anchors, rest = (rest[:rows], rest[rows:]) if self.config.unmasked_anchors else (masked, rest)
        positives = rest.reshape(rows, self.run.spans.num_positives, embeddings.shape[-1]).mean(dim=1)
        return torch.stack([anchors, positives], dim=1)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """The contrastive loss of the global batch."""
        embeddings = _anchors_first(batch.views)
        if self._metric_loss is not None:
            value = self._metric_loss(embeddings)
        else:
            assert isinstance(self.config.loss, NTXentConfig)
            value = ntxent(
                embeddings,
                self.config.loss.temperature,
                None if self.queue is None else batch.cut(self.queue),
                row_shard=batch.row_shard,
                documents=batch.facts.get("document"),
                queue_documents=self.queue_documents,
            )
        if self.config.reference_rank_scaling:
            divided = value / self.config.reference_rank_scaling
            value = divided + (value - divided).detach()
        return {"contrastive": value}

    def remember(self, batch: Gathered) -> None:
        """Appends a finished step's `(2M, D)` embeddings to the queue, and drops the oldest ones."""
        self.queue = self._appended(self.queue, _anchors_first(batch.views))
        if "document" in batch.facts:
            self.queue_documents = self._appended(self.queue_documents, batch.facts["document"].repeat(2))

    def _appended(self, queue: Tensor | None, values: Tensor) -> Tensor:
        return (values if queue is None else torch.cat([queue, values]))[-self.config.queue_size :].clone()

    def validator(
        self,
        held_out: ShardSet,
        vocabulary: Vocabulary,
        max_content: int,
        max_documents: int,
        comm: Communicator,
        device: torch.device,
    ) -> SpanValidator:
        """Builds the validator: retrieval of unmasked spans of the same document, even if only MLM is trained.

        The touching pair is an anchor and a positive that touches it. The distant pair comes from `place_distant`. The
        spans of a pair do not overlap. At most `max_documents` documents are scored, chosen by the run's seed.
        """
        pair = SpanConfig(
            num_anchors=1,
            num_positives=1,
            min_tokens=self.run.spans.min_tokens,
            max_tokens=self.run.spans.max_tokens,
            strategy="adjacent",
        )
        collator = SpanCollator(
            spans=pair,
            masking=None,
            unmasked_anchors=False,
            include_positives=True,
            max_content=max_content,
            vocabulary=vocabulary,
            seed=self.run.seed,
            short_documents=self.run.short_documents,
        )
        rows = held_out_rows(held_out, max_documents, self.run.seed)
        return SpanValidator(collator, held_out, rows, comm, device, sizes=self.sizes)

    def state(self) -> dict[str, Tensor]:
        """The queue, once it exists, and its documents if the loss needs them."""
        tensors = {"queue": self.queue, "queue_documents": self.queue_documents}
        return {name: values for name, values in tensors.items() if values is not None}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the queue unless it is longer than `queue_size`, or its documents are unknown and needed.

        Raises:
            RuntimeError: the state has other tensors, so it is of another objective.
        """
        if unexpected := sorted(state.keys() - {"queue", "queue_documents"}):
            raise RuntimeError(f"unexpected {', '.join(unexpected[:3])}")
        queue, documents = state.get("queue"), state.get("queue_documents")
        needed = self.config.excludes_same_document
        fits = queue is not None and len(queue) <= self.config.queue_size and not (needed and documents is None)
        self.queue = queue if fits else None
        self.queue_documents = documents if fits and needed else None


def _anchors_first(views: Tensor) -> Tensor:
    """`(2M, D)` from `(M, 2, D)`: all anchors, then all positives."""
    return torch.cat([views[:, 0], views[:, 1]])
