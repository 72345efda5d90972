"""STS-B and SICK-R as scores of a validation: correlation of cosines and people's judgements. Legend: N pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.metrics.config import STSB
from declutr.trainer.metrics.judged_pairs import judged_cosines
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.scores import RowScore, by_size, embed_together
from declutr.trainer.parallel.communicator import Communicator


@dataclass(frozen=True)
class StsValidator:
    """Scores an encoder on judged pairs, shared among the workers."""

    ids: list[list[int]]  # `2N` lists of token ids with specials: the first texts of all pairs, then the second ones
    gold: list[float]  # N judgements
    layers: Sequence[Dense]  # layers behind the pooling that are exported
    comm: Communicator  # the workers
    device: torch.device  # device of the encoder
    sizes: tuple[int, ...] = ()  # smaller sizes of the embedding to score too
    score: str = STSB  # name of the score

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """Spearman correlation in percent, 0 if all cosines are equal; None if embeddings are not finite."""
        embeddings = embed_together(encoder, len(self.ids), self._batch, self.layers, self.comm, self.device)
        if not bool(embeddings.isfinite().all()):
            return None

        def scores(size: int | None) -> dict[str, float]:
            first, second = embeddings[:, :size].numpy().reshape(2, len(self.gold), -1)
            pairs = judged_cosines(first, second, self.gold)
            # pairs have no id, so their place in the file decides their half
            return {self.score: RowScore(np.arange(len(pairs), dtype=np.uint64), pairs)}

        return by_size(self.sizes, scores)

    def _batch(self, part: slice) -> SpanBatch:
        texts = self.ids[part]
        nothing = torch.empty(0, dtype=torch.int64)
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        return SpanBatch(ids, torch.tensor([len(text) for text in texts], dtype=torch.int64), nothing, nothing)
