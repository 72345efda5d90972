"""Held-out scores of an encoder: same-document span retrieval, alignment, uniformity, effective rank.

Retrieval is scored twice: between spans that touch, and between distant ones (trainer/objectives/declutr/distant.py).
Legend: N held-out documents, H embedding size.
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
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.declutr.distant import DISTANT, place_distant
from declutr.trainer.objectives.declutr.spans import Spans, draw, pair_lengths
from declutr.trainer.objectives.held_out import HELD_OUT_EPOCH, compute_together
from declutr.trainer.objectives.measures import alignment, by_size, effective_rank, retrieval, uniformity
from declutr.trainer.parallel.communicator import Communicator


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
        found = by_size(self.sizes, lambda size: held_out.scores(keys, size))
        return found | {"distant_share": float(held_out.reached.mean())}

    def embed(self, encoder: Encoder) -> HeldOut:
        """Pooled embeddings as exported, on every worker: without projection, masks and dropout."""

        def rows_of(some: slice) -> Tensor:
            return self._embed(encoder, self.shards.take(self.rows[some]))

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
