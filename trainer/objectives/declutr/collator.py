"""Documents to span batches: sample, cut, add specials, mask, pack. Numpy until the last line; no Ray, no state.

Order of the spans of n documents: all anchors (document by document), then, if wanted, the same anchors unmasked, then
(unless only MLM is trained) all positives, document by document, anchor by anchor.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.data.batches import RankBatch, SpanBatch
from declutr.trainer.data.packing import Vocabulary, dropout_words, pack
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.spans import Spans, sample_spans
from declutr.trainer.objectives.masking import MaskingConfig, mask_spans, ranges

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class SpanCollator:
    """Turns documents into the spans of a step.

    Attributes:
        spans: geometry and strategy.
        masking: settings of masking; None if no MLM loss is computed.
        unmasked_anchors: also pack every anchor without masks, for the contrastive embedding.
        include_positives: False if there is no contrastive loss.
        max_content: largest number of tokens of a span, without specials; longer spans are cut at the end.
        vocabulary: ids of the tokenizer.
        seed: the run's seed.
        short_documents: treatment of documents with room for fewer than A anchors when the shards were prepared.
        names_documents: give the loss the key of each row's document, as the fact `document`.
    """

    spans: SpanConfig
    masking: MaskingConfig | None
    unmasked_anchors: bool
    include_positives: bool
    max_content: int
    vocabulary: Vocabulary
    seed: int
    short_documents: ShortDocuments = "drop"
    names_documents: bool = False

    def sample(self, documents: pa.Table, epochs: I64) -> Spans:
        """Spans of these shard rows in these epochs."""
        return sample_spans(self.spans, self.seed, self.short_documents, documents, epochs)

    def collate(self, rows: pa.Table, epochs: I64) -> RankBatch:
        """The spans of n documents, with a row of views for each contrasted anchor (trainer/objectives/base.py)."""
        spans = self.sample(rows, epochs)
        contrasted = int(spans.present.sum()) if self.include_positives else 0
        facts = {}
        if self.names_documents:
            owners = np.repeat(document_keys(rows).view(np.int64), spans.present.sum(axis=1))
            facts = {"document": torch.from_numpy(owners)}
        return RankBatch(self.pack(rows, epochs, spans), len(rows), contrasted, facts)

    def batch(self, documents: pa.Table, epochs: I64) -> SpanBatch:
        """The spans of n documents, cut, masked and packed.

        Args:
            documents: n rows of the shards.
            epochs: `(n,)` epoch in which each is read.
        """
        return self.pack(documents, epochs, self.sample(documents, epochs))

    def pack(self, documents: pa.Table, epochs: I64, spans: Spans) -> SpanBatch:
        """Cuts, masks and packs spans that were drawn from these documents before."""
        tokens, offsets = ragged(documents.column("tokens"))
        anchors, positives = spans.anchors[spans.present], spans.positives[spans.present].reshape(-1, 2)
        copies = [anchors] + [anchors] * self.unmasked_anchors + [positives] * self.include_positives
        bounds = np.concatenate(copies)
        num_anchors = spans.present.sum(axis=1)
        counts = [num_anchors] + [num_anchors] * self.unmasked_anchors
        counts += [num_anchors * self.spans.num_positives] * self.include_positives
        document = np.concatenate([np.repeat(np.arange(len(epochs)), count) for count in counts])
        number = np.concatenate([ranges(count) for count in counts])  # within document and kind

        content = np.minimum(bounds[:, 1] - bounds[:, 0], self.max_content)
        packed = pack(tokens, offsets[document] + bounds[:, 0], content, self.vocabulary)
        keys, spans_epochs = document_keys(documents)[document], epochs[document].astype(np.uint64)
        selected = labels = np.empty(0, np.int64)
        if self.masking is not None:
            first = slice(len(anchors))  # the anchors to be masked come first
            owners = keys[first], spans_epochs[first], number[first]
            selected, labels = mask_spans(
                self.masking, self.seed, self.vocabulary, packed.ids, packed.places[first], content[first], *owners
            )
        kinds = np.repeat(np.arange(len(copies)), [len(part) for part in copies])
        words = dropout_words(self.seed, keys, spans_epochs, number + (kinds << 16))
        return SpanBatch(*(torch.from_numpy(array) for array in (packed.ids, packed.lengths, selected, labels, words)))
