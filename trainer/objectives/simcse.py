"""SimCSE: a sentence must find its second view, or its entailed hypothesis, in the global batch.

Legend: n rows on this worker, M rows of the global batch, V views of a row, D embedding size; of a contrast N queries
and C columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from declutr.pipeline.shards.content import CONTRADICTION, ENTAILMENT
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model.behind import Dense
from declutr.trainer.objectives.base import Gathered, RowShard, tile_rows, tiles_of, unit_rows
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.objectives.texts import I64, TextCollator, TextObjective, Texts, draw_labelled

_MASKED = 9  # above the views' numbers, 0 to 2, so a copy has its own dropout
"""Number of the first masked copy among the spans of its row."""


def infonce(
    queries: Tensor,  # `(N, D)`
    columns: Tensor,  # `(N, D)` positives, or `(2N, D)` positives and hard negatives
    temperature: float,  # t
    own_weight: float = 0.0,  # w, added to the logit of a query's own hard negative
    # this worker's rows of N, whose gradient is computed, while that of others is 0; None: all.
    row_shard: RowShard | None = None,
) -> Tensor:
    """Mean over i of -log(exp(s_ii) / sum_j exp(s_ij)), s_ij = cos(q_i, c_j) / t + w [j = i + N].

    SimCSE eq. 1 without, eq. 5 with a second block of N columns, the hard negatives. The loss and its gradient hold a
    few tiles of the N x C scores at a time.
    """
    with torch.autocast(queries.device.type, enabled=False):
        rows, unit_columns = unit_rows(queries), unit_rows(columns)
        settings = temperature, own_weight, tile_rows(rows.device), row_shard
        scores = _Scores(rows.detach(), unit_columns.detach(), *settings)
        return _TiledInfoNCE.apply(rows, unit_columns, scores)  # type: ignore[no-untyped-call]


class _TiledInfoNCE(torch.autograd.Function):
    """The loss of unit rows, term i as log(1 + exp(l_i - s_ii)), l_i the logsumexp of i's negatives.

    This form and its gradient keep their precision in float32 when the positive's score is by far the largest.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, scores: "_Scores") -> Tensor:
        if scores.row_shard is None:
            log_sums = scores.log_sums()
        else:
            (log_sums,) = scores.row_shard.complete(lambda: scores.log_sums()[None], rows)
        positive = (rows * columns[: len(rows)]).sum(dim=1) / scores.temperature
        ctx.save_for_backward(rows, columns, log_sums, positive)
        ctx.scores = scores
        return -F.logsigmoid(positive - log_sums).mean()  # the mean, which SimCSE's paper writes as a sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, columns, log_sums, positive = ctx.saved_tensors
        scores: _Scores = ctx.scores
        row_shard = scores.row_shard
        with torch.autocast(rows.device.type, enabled=False):
            weights = torch.sigmoid(log_sums - positive) * (upstream / (len(rows) * scores.temperature))
            to_rows = -weights[:, None] * columns[: len(rows)]
            to_columns = torch.zeros_like(columns)
            to_columns[: len(rows)] = -weights[:, None] * rows
            if row_shard is None:
                for first, second, tile in scores.tiles():
                    pushes = tile.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                    to_rows[first].addmm_(pushes, columns[second])
                    to_columns[second].addmm_(pushes.T, rows[first])
                return to_rows, to_columns, None
            for first, second, tile in scores.tiles(row_shard.tiles(len(rows), scores.size)):
                pushes = tile.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                to_rows[first].addmm_(pushes, columns[second])
            # all queries push this worker's columns
            for first, second, tile in scores.tiles(None, row_shard.tiles(len(columns), scores.size)):
                pushes = tile.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                to_columns[second].addmm_(pushes.T, rows[first])
        return row_shard.only_own(to_rows), row_shard.only_own(to_columns), None


@dataclass(frozen=True)
class _Scores:
    """Tiles of the scores of unit queries `(N, D)` with unit columns `(C, D)`; `infonce` has the fields."""

    rows: Tensor
    columns: Tensor
    temperature: float
    own_weight: float
    size: int
    row_shard: RowShard | None

    def log_sums(self) -> Tensor:
        """`(N,)` logsumexp of the negatives of each query, or of those of the row shard."""
        # The lowest finite number, not -inf: a single query has no negatives, and its gradient must be 0, not NaN.
        log_sums = self.rows.new_full((len(self.rows),), torch.finfo(self.rows.dtype).min)
        firsts = None if self.row_shard is None else self.row_shard.tiles(len(self.rows), self.size)
        for first, _, tile in self.tiles(firsts):
            torch.logaddexp(log_sums[first], tile.logsumexp(dim=1), out=log_sums[first])
        return log_sums

    def tiles(
        self, firsts: list[slice] | None = None, seconds: list[slice] | None = None
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of some queries and columns, or of all; a query's score with its positive is the lowest number."""
        for first in tiles_of(0, len(self.rows), self.size) if firsts is None else firsts:
            for second in tiles_of(0, len(self.columns), self.size) if seconds is None else seconds:
                tile = (self.rows[first] @ self.columns[second].T).div_(self.temperature)
                # Query i meets its positive in column i and its own hard negative in column i + N: two diagonals.
                for distance, weight in ((0, None), (len(self.rows), self.own_weight)):
                    offset = distance + first.start - second.start
                    if -tile.shape[0] < offset < tile.shape[1]:  # the tile holds a part of it
                        diagonal = tile.diagonal(offset)
                        diagonal.fill_(torch.finfo(tile.dtype).min) if weight is None else diagonal.add_(weight)
                yield first, second, tile


class Simcse(TextObjective[SimcseConfig]):
    """The cross entropy over `(M, 2, D)` views, or `(M, 3, D)` with hard negatives."""

    shards_rows = True
    cuts_exported = True

    def __init__(self, config: SimcseConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.labels = (ENTAILMENT, CONTRADICTION)[: 1 + config.hard_negatives] if config.supervised else ()
        self.num_views = 1 + max(1, len(self.labels))
        self.head: nn.Module = nn.Identity()
        if config.head:
            self.head = Dense(nn.Linear(embedding_size, embedding_size), nn.Tanh())  # the released MLP pooler

    def batch(self, texts: Texts, epochs: I64, collator: TextCollator) -> RankBatch:
        """The views of each row one after the other, and behind them all masked copies."""
        config, count = self.config, len(texts.first)
        if config.supervised:
            hypotheses = [draw_labelled(texts, label, self.run.seed, epochs) for label in self.labels]
            views = np.stack([texts.first, *hypotheses], axis=1)
        else:
            views = np.stack([texts.first, texts.first], axis=1)
        chosen = views.reshape(-1)
        # one number, one dropout key
        own = np.zeros(views.shape[1], np.int64) if config.equal_views else np.arange(views.shape[1])
        numbers = np.tile(own, count)
        places = torch.arange(len(chosen)).view(views.shape)  # before the copies, which are no views
        masking = None
        if config.mlm:
            masking = config.masking, slice(len(chosen), None)
            copied = views if config.mlm_copies == "all" else views[:, :1]
            chosen = np.concatenate([chosen, copied.reshape(-1)])
            numbers = np.concatenate([numbers, _MASKED + np.tile(np.arange(copied.shape[1]), count)])
        queries = np.isin(chosen, texts.first) if config.asks else None
        spans = collator.pack(texts, chosen, numbers, epochs, masking=masking, queries=queries)
        return RankBatch(spans, count, views=places)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """SimCSE eq. 1; with hard negatives eq. 5, whose weight is added to the logit of a row's own negative."""
        embeddings = self.head(batch.views)
        first, *rest = (batch.cut(embeddings) if self.exported() else embeddings).unbind(1)
        weight = self.config.hard_negative_weight
        return {
            "contrastive": infonce(first, torch.cat(rest), self.config.temperature, weight, row_shard=batch.row_shard)
        }

    def exported(self) -> list[Dense]:
        """The head, if the run is supervised; SimCSE drops it after unsupervised training."""
        return [self.head] if self.config.supervised and isinstance(self.head, Dense) else []
