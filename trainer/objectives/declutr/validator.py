"""Held-out scores of an encoder: same-document span retrieval, alignment, uniformity, effective rank.

Retrieval is scored twice. Spans that touch share a sentence, names and words, so an encoder that sees only these finds
one by the other. Spans that are far from each other share the topic of their document.

Legend: n documents, N held-out documents, H embedding size.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from declutr.pipeline.shards.shards import document_keys, ragged
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import HeldOutSplit
from declutr.trainer.objectives.declutr.spans import I64, Draws, SpanCollator, Spans, draw, pair_lengths
from declutr.trainer.objectives.scores import (
    HELD_OUT_EPOCH,
    alignment,
    by_size,
    compute_together,
    effective_rank,
    retrieval,
    uniformity,
)

DISTANT = "distant spans"  # Purpose under which the random numbers of distant spans are drawn
_CHUNK = 64  # documents in one forward


def place_distant(
    draws: Draws,  # the random numbers
    num_tokens: I64,  # `(n,)` lengths of the documents
    # `(n,)` tokens of the anchors and `(n,)` of the positives; each document has room for both.
    lengths: tuple[I64, I64],
    distance: int,  # wanted number of tokens between the two
) -> tuple[Spans, NDArray[np.bool_]]:
    """Places an anchor and a positive in each document, with at least `distance` tokens between them.

    The remaining tokens are distributed at random before, between and after the two spans, and their order is random
    too. If a document is too short for the distance, one span starts the document and the other ends it.

    Returns:
        The spans, one anchor and one positive a document, and `(n,)` true where the distance is reached.
    """
    anchor, positive = lengths
    room = num_tokens - anchor - positive
    between = np.minimum(distance, room)  # as far as the document allows
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
        queries=np.zeros((len(num_tokens), 1), np.bool_),
    )
    return spans, room >= distance


@dataclass(frozen=True)
class SpanValidator:
    """Scores an encoder on held-out documents, shared among the workers."""

    collator: SpanCollator  # draws one anchor and one touching positive from each document
    held_out: HeldOutSplit  # the held-out split
    rows: I64  # `(N,)` rows of the documents to score
    sizes: tuple[int, ...] = ()  # smaller sizes of the embedding to score too

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """All scores, None if embeddings are not finite; `distant_share`: of documents with spans far enough apart."""
        *pairs, reached = self.embed(encoder)
        if not all(bool(table.isfinite().all()) for table in pairs):
            return None
        keys = document_keys(self.held_out.shards.take(self.rows))

        def scores(size: int | None) -> dict[str, float]:
            anchors, positives, first, second = (table[:, :size] for table in pairs)
            return {
                **retrieval(anchors, positives, keys),
                **{f"distant_{name}": value for name, value in retrieval(first, second, keys).items()},
                "alignment": alignment(anchors, positives),
                "uniformity": uniformity(anchors),
                "effective_rank": effective_rank(anchors),
            }

        return by_size(self.sizes, scores) | {"distant_share": float(reached.mean())}

    def embed(self, encoder: Encoder) -> tuple[Tensor, ...]:
        """Pooled embeddings as exported, on every worker: without projection, masks and dropout.

        `(N, H)` each in float64 on the CPU: one span of each document, the span that touches it, another span, the span
        far from that one. Then `(N, 1)`: 1 where these two have the distance, 0 where the document is too short for it.
        """
        device, width = self.held_out.device, encoder.output_size

        def rows_of(part: slice) -> Tensor:
            """`(n, 4 H + 1)`. Two separate forwards need only the memory of one."""
            documents = self.held_out.shards.take(self.rows[part])
            epochs = np.full(len(documents), HELD_OUT_EPOCH, np.int64)
            distant, reached = self.sample_distant(documents)
            touching = self.collator.sample(documents, epochs)
            batches = (self.collator.pack(documents, epochs, spans) for spans in (touching, distant))
            pairs = [encoder.embed(batch.to(device)).view(2, len(documents), width) for batch in batches]
            far = torch.from_numpy(reached).to(pairs[0])[:, None]  # a number of the row, so that one gather is enough
            return torch.cat([*pairs[0], *pairs[1], far], dim=1)

        workers = self.held_out.comm, device
        table = compute_together(encoder, len(self.rows), 4 * width + 1, rows_of, *workers, _CHUNK)
        return table.split([width] * 4 + [1], dim=1)

    def sample_distant(self, documents: pa.Table) -> tuple[Spans, NDArray[np.bool_]]:
        """Distant spans of these documents, and `(n,)` true where they are far enough apart."""
        run = self.collator.run
        windows, offsets = ragged(documents.column("windows"))
        draws = draw(  # epoch 0: the purpose alone keeps these draws apart from training's
            run.spans, run.seed, np.zeros(len(documents), np.int64), document_keys(documents), DISTANT
        )
        lengths = pair_lengths(run.spans, draws, windows.astype(np.int64), offsets, run.short_documents)
        return place_distant(draws, documents.column("num_tokens").to_numpy(), lengths, run.spans.max_tokens)
