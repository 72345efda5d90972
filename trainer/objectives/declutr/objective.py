"""DeCLUTR: contrasts spans of the same document with all others, and predicts masked tokens of the anchors.

Legend: n documents on this rank, m their anchors (n * A, or fewer if documents are short), A anchors a document, P
positives an anchor, M = anchors of the global batch, D size.
"""

import torch
from torch import Tensor

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.objectives.base import Gathered, Objective
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig, NTXentConfig
from declutr.trainer.objectives.declutr.ntxent import MetricLearningLoss, ntxent
from declutr.trainer.objectives.declutr.validation import SpanValidator
from declutr.trainer.objectives.held_out import held_out_rows
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.parallel.communicator import Communicator


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
        found = {"queue": self.queue, "queue_documents": self.queue_documents}
        return {name: values for name, values in found.items() if values is not None}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the queue unless it is longer than `queue_size`, or its documents are unknown and needed.

        Raises:
            RuntimeError: the state has other tensors, so it is of another objective.
        """
        if others := sorted(state.keys() - {"queue", "queue_documents"}):
            raise RuntimeError(f"unexpected {', '.join(others[:3])}")
        queue, documents = state.get("queue"), state.get("queue_documents")
        needed = self.config.excludes_same_document
        fits = queue is not None and len(queue) <= self.config.queue_size and not (needed and documents is None)
        self.queue = queue if fits else None
        self.queue_documents = documents if fits and needed else None


def _anchors_first(views: Tensor) -> Tensor:
    """`(2M, D)` from `(M, 2, D)`: all anchors, then all positives."""
    return torch.cat([views[:, 0], views[:, 1]])
