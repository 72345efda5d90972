"""Held-out scores of short texts: retrieval of entailed hypotheses, alignment, uniformity, effective rank.

Legend: N held-out rows, S texts, H embedding size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.shards.shards import ShardSet
from trainer.data.plan import permute
from trainer.model.encoder import Encoder
from trainer.objectives.base import Dense
from trainer.objectives.measures import alignment, effective_rank, retrieval, uniformity
from trainer.objectives.texts import TextPacker, Texts
from trainer.parallel.world import World

_EPOCH = 2**32 - 1  # the epoch whose order chooses the rows; training never reaches it
_ENTAILMENT = 0


def held_out_rows(available: int, most: int, seed: int) -> NDArray[np.int64]:
    """Numbers of at most `most` held-out rows, chosen by the run's seed, ascending."""
    chosen = min(most, available)
    return np.sort(permute(seed, np.full(chosen, _EPOCH), np.arange(chosen), available))


@dataclass(frozen=True)
class TextValidator:
    """Scores an encoder on held-out texts, shared among the workers.

    Sentences have no pairs, so only uniformity and effective rank are computed. Of other rows, the premise must find
    its first entailed hypothesis; rows without one are left out of the retrieval.

    Attributes:
        packer: packs texts.
        shards: rows to score.
        rows: `(N,)` their numbers.
        layers: layers behind the pooling that are exported.
        world: the workers.
        device: device of the encoder.
        chunk_texts: number of rows in one forward.
    """

    packer: TextPacker
    shards: ShardSet
    rows: NDArray[np.int64]
    layers: list[Dense]
    world: World
    device: torch.device
    chunk_texts: int = 256

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The scores by name; None if embeddings are not finite."""
        texts = Texts(self.shards.take(self.rows))
        entailed = np.flatnonzero(texts.labels == _ENTAILMENT)
        having, places = np.unique(texts.rows[entailed], return_index=True)
        chosen = np.concatenate([texts.first, entailed[places]])
        found = self._embed(encoder, texts, chosen)
        if not bool(found.isfinite().all()):
            return None
        first, positives = found[: len(texts.first)], found[len(texts.first) :]
        scores = {"uniformity": uniformity(first), "effective_rank": effective_rank(first)}
        if len(positives) < 2:
            return scores
        anchors = first[torch.from_numpy(having)]
        return {**retrieval(anchors, positives), "alignment": alignment(anchors, positives), **scores}

    def _embed(self, encoder: Encoder, texts: Texts, chosen: NDArray[np.int64]) -> Tensor:
        """`(S, H)` embeddings of the chosen texts as exported, in float64 on the CPU, on every worker."""
        was_training = encoder.training
        encoder.eval()
        total, rank, size = len(chosen), self.world.rank, self.world.size
        start, end = total * rank // size, total * (rank + 1) // size
        forwards = -(-(end - start) // self.chunk_texts)
        if encoder.sharded:  # forwards gather weights, so every worker runs the same number
            forwards = self.world.largest(forwards)
        epochs = np.zeros(len(texts.first), np.int64)
        parts = []
        with torch.no_grad():
            for number in range(forwards):
                first = start + number * self.chunk_texts
                some = chosen[first : min(end, first + self.chunk_texts)]
                batch = self.packer.pack(texts, some, np.zeros(len(some), np.int64), epochs)
                parts.append(project(encoder.embed(batch.to(self.device)), self.layers))
            width = self.layers[-1].linear.out_features if self.layers else encoder.hidden_size
            empty = torch.empty(0, width, device=self.device, dtype=parts[0].dtype if parts else torch.float32)
            found = self.world.gather(torch.cat([empty, *parts]), start, total)
        encoder.train(was_training)
        return found.double().cpu()


def project(embeddings: Tensor, layers: list[Dense]) -> Tensor:
    """Embeddings behind the exported layers, `(S, H')` from `(S, H)`."""
    for layer in layers:
        module = nn.Sequential(layer.linear, layer.activation)
        embeddings = module(embeddings.to(layer.linear.weight.dtype))
    return embeddings
