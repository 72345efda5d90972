"""Held-out scores of an encoder: same-document span retrieval, alignment, uniformity, effective rank.

Legend: N held-out documents, H embedding size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.shards import ShardSet
from trainer.feed import Feed
from trainer.gather import World
from trainer.model import Encoder
from trainer.plan import permute
from trainer.settings import ValidationConfig as ValidationConfig
from trainer.spans import SpanConfig

# Held-out spans are drawn in an "epoch" that training never reaches, so they are the same at every validation.
_EPOCH = 2**32 - 1


def retrieval(anchors: Tensor, positives: Tensor) -> dict[str, float]:
    """Recall@1 and mean reciprocal rank of each anchor's positive among all N positives, by cosine.

    Rank counts ties against the encoder, so that equal embeddings do not look perfect.

    Args:
        anchors: `(N, H)`.
        positives: `(N, H)`.
    """
    scores = F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).T
    ranks = (scores >= scores.diagonal()[:, None]).sum(dim=1).double()
    return {"recall_at_1": float((ranks == 1).double().mean()), "mrr": float((1 / ranks).mean())}


def alignment(anchors: Tensor, positives: Tensor) -> float:
    """Mean squared distance of pairs on the unit sphere (Wang and Isola 2020); 0 is perfect."""
    return float((F.normalize(anchors, dim=-1) - F.normalize(positives, dim=-1)).square().sum(dim=-1).mean())


def uniformity(embeddings: Tensor) -> float:
    """Log of the mean of exp(-2 ||x - y||^2) over pairs on the unit sphere (Wang and Isola 2020); lower is better."""
    distances = torch.pdist(F.normalize(embeddings, dim=-1)).square()
    return float(distances.mul(-2).exp().mean().log())


def effective_rank(embeddings: Tensor) -> float:
    """Exp of the entropy of the normalised singular values of centred unit embeddings (Roy and Vetterli 2007)."""
    unit = F.normalize(embeddings, dim=-1)
    values = torch.linalg.svdvals(unit - unit.mean(dim=0))
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return float(torch.special.entr(shares).sum().exp())


@dataclass(frozen=True)
class Validator:
    """Scores an encoder on held-out documents, shared among the workers.

    Attributes:
        feed: draws one anchor and one positive beside it from each document.
        shards: the held-out split.
        rows: `(N,)` documents that are scored.
        world: the workers.
        device: where the encoder is.
        chunk_documents: documents in one forward.
    """

    feed: Feed
    shards: ShardSet
    rows: np.ndarray
    world: World
    device: torch.device
    chunk_documents: int = 64

    def score(self, encoder: Encoder) -> dict[str, float]:
        """Scores of the pooled embeddings, as exported: without projection, masks and dropout."""
        return score_pairs(*self.embed(encoder))

    def embed(self, encoder: Encoder) -> tuple[Tensor, Tensor]:
        """Embeddings `(N, H)` of the anchors and of the positives, on every worker, on the CPU in float64."""
        was_training = encoder.training
        encoder.eval()
        total = len(self.rows)
        start, end = total * self.world.rank // self.world.size, total * (self.world.rank + 1) // self.world.size
        parts = [torch.empty(0, 2 * encoder.hidden_size, device=self.device)]
        forwards = -(-(end - start) // self.chunk_documents)
        if encoder.sharded:  # an exchange each: as many on every worker, the last ones empty
            forwards = self.world.largest(forwards)
        with torch.no_grad():
            for number in range(forwards):
                first = start + number * self.chunk_documents
                rows = self.rows[first : min(end, first + self.chunk_documents)]
                batch = self.feed.batch(self.shards.take(rows), np.full(len(rows), _EPOCH, np.int64))
                pair = encoder.embed(batch.to(self.device)).view(2, len(rows), encoder.hidden_size)
                parts.append(torch.cat([pair[0], pair[1]], dim=1))
            pairs = self.world.gather(torch.cat(parts), start, total)
        encoder.train(was_training)
        anchors, positives = pairs.double().cpu().chunk(2, dim=1)
        return anchors, positives


def score_pairs(anchors: Tensor, positives: Tensor) -> dict[str, float]:
    """All held-out scores of `(N, H)` anchors and their positives."""
    return {
        **retrieval(anchors, positives),
        "alignment": alignment(anchors, positives),
        "uniformity": uniformity(anchors),
        "effective_rank": effective_rank(anchors),
    }


def build_validator(
    config: ValidationConfig,
    spans: SpanConfig,
    shards: ShardSet,
    feed_for: Callable[[SpanConfig], Feed],
    seed: int,
    world: World,
    device: torch.device,
) -> Validator:
    """A validator over at most `max_documents` held-out documents, chosen by the run's seed.

    Query and target are an anchor and a positive that touches it without overlap, so that no token is shared.
    """
    pair = SpanConfig(
        num_anchors=1,
        num_positives=1,
        min_tokens=spans.min_tokens,
        max_tokens=spans.max_tokens,
        strategy="adjacent",
    )
    chosen = min(config.max_documents, shards.num_documents)
    order = permute(seed, np.full(chosen, _EPOCH), np.arange(chosen), shards.num_documents)
    return Validator(feed_for(pair), shards, np.sort(order), world, device)
