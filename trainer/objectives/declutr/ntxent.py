"""Contrastive losses over the embeddings of a whole global batch.

Legend: M anchors of the batch, D embedding size, Q queued embeddings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from declutr.trainer.objectives.row_shard import RowShard, tile_rows, tiles_of


def ntxent(
    embeddings: Tensor,
    temperature: float,
    queue: Tensor | None = None,
    tile: int | None = None,
    row_shard: RowShard | None = None,
    documents: Tensor | None = None,
    queue_documents: Tensor | None = None,
) -> Tensor:
    """Mean over the 2M terms of -log(exp(s_ij/t) / sum_k exp(s_ik/t)), k over all but i and over the queue.

    With `documents`, k leaves out the rows of i's own document except its positive j.

    The loss and its gradient hold only a few tiles of the 2M x (2M + Q) scores at a time.

    Args:
        embeddings: `(2M, D)`, anchors first; row i and row i + M are each other's positive.
        temperature: t.
        queue: `(Q, D)` embeddings of earlier steps, negatives for every row; no gradient.
        tile: rows and columns of a tile; None: by device. The result does not depend on it.
        row_shard: this worker's rows of M, whose gradient is computed, while that of others is 0; None: all.
        documents: `(M,)` integer keys of the anchors' documents; None: every other row is a negative.
        queue_documents: `(Q,)` keys of the documents of the queue, given if `documents` and `queue` are.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        rows = F.normalize(embeddings, dim=-1)
        old = rows.new_empty(0, rows.shape[-1]) if queue is None else F.normalize(queue.to(rows.dtype), dim=-1)
        size = tile or tile_rows(rows.device)
        owners = None
        if documents is not None:
            empty = documents.new_empty(0)
            owners = documents.repeat(2), empty if queue_documents is None else queue_documents
        scores = _Scores(rows.detach(), old.detach(), temperature, size, row_shard, owners)
        value: Tensor = _TiledNTXent.apply(rows, scores)  # type: ignore[no-untyped-call]
        return value


class _TiledNTXent(torch.autograd.Function):
    """NT-Xent of unit rows, term i as log(1 + exp(l_i - p_i)), l_i the logsumexp of i's negatives, p_i its positive.

    Unlike softmax minus one-hot, this form and its gradient keep their precision in float32 when the positive's score
    is by far the largest and the loss is almost 0. The scores are symmetric, so without a row shard a tile is used for
    its rows and, transposed, for its columns.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scores: "_Scores") -> Tensor:
        row_shard = scores.row_shard
        if row_shard is None:
            log_sums = scores.log_sums()
        else:
            (log_sums,) = row_shard.complete(lambda: scores.log_sums()[None], rows)
        anchors, positives = rows.chunk(2)
        positive = ((anchors * positives).sum(dim=1) / scores.temperature).repeat(2)
        ctx.save_for_backward(rows, log_sums, positive)
        ctx.scores = scores
        return -F.logsigmoid(positive - log_sums).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        rows, log_sums, positive = ctx.saved_tensors
        scores: _Scores = ctx.scores
        with torch.autocast(rows.device.type, enabled=False):
            weights = torch.sigmoid(log_sums - positive) * (upstream / (len(rows) * scores.temperature))
            pulls = weights + weights.roll(len(rows) // 2)  # p_i is also the positive of i's partner
            gradient = -pulls[:, None] * rows.roll(len(rows) // 2, dims=0)
            for first, second, tile in scores.own():
                pushes = (tile - log_sums[first, None]).exp_().mul_(weights[first, None])
                pushes += tile.sub_(log_sums[None, second]).exp_().mul_(weights[None, second])
                gradient[first].addmm_(pushes, rows[second])
                if scores.row_shard is None and second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
            for first, second, tile in scores.queued():
                pushes = tile.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                gradient[first].addmm_(pushes, scores.queue[second])
        return gradient if scores.row_shard is None else scores.row_shard.only_own(gradient), None


@dataclass(frozen=True)
class _Scores:
    """Tiles of the scores of unit rows with each other and with the queue.

    A score that is no negative has the lowest finite number: that of a row with itself, with its positive and, if
    `owners` is given, with the other rows of its document.

    Attributes:
        rows: `(2M, D)`, anchors first.
        queue: `(Q, D)`.
        temperature: divisor of the scores.
        size: rows and columns of a tile.
        row_shard: this worker's rows; None: all.
        owners: `(2M,)` and `(Q,)` keys of the documents of rows and queue; None: rows of one document are negatives.
    """

    rows: Tensor
    queue: Tensor
    temperature: float
    size: int
    row_shard: RowShard | None
    owners: tuple[Tensor, Tensor] | None

    def log_sums(self) -> Tensor:
        """`(2M,)` logsumexp of each row's negatives; with a row shard, of its rows alone."""
        # The lowest finite number, not -inf: a row without negatives must have the gradient 0, not NaN.
        log_sums = self.rows.new_full((len(self.rows),), torch.finfo(self.rows.dtype).min)
        for first, second, scores in self.own():
            _add_exp(log_sums[first], scores.logsumexp(dim=1))
            if self.row_shard is None and second != first:
                _add_exp(log_sums[second], scores.logsumexp(dim=0))
        for first, _, scores in self.queued():
            _add_exp(log_sums[first], scores.logsumexp(dim=1))
        return log_sums

    def own(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles on and above the diagonal of the scores of rows with each other.

        On the diagonal a tile holds both (i, k) and (k, i). With a row shard: all columns for this worker's rows.
        """
        apart = len(self.rows) // 2
        parts = tiles_of(0, len(self.rows), self.size)
        for number, first in enumerate(self._row_tiles()):
            for second in parts[number:] if self.row_shard is None else parts:
                scores = (self.rows[first] @ self.rows[second].T).div_(self.temperature)
                for distance in (0, apart, -apart):  # column - row
                    # Outside the tile there is nothing to exclude, and torch would raise an error.
                    if -scores.shape[0] < (offset := distance + first.start - second.start) < scores.shape[1]:
                        scores.diagonal(offset).fill_(torch.finfo(scores.dtype).min)
                if self.owners is not None:
                    self._exclude(scores, self.owners[0][first], self.owners[0][second])
                yield first, second, scores

    def queued(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of the scores of rows with queued embeddings."""
        for first in self._row_tiles():
            for second in tiles_of(0, len(self.queue), self.size):
                scores = (self.rows[first] @ self.queue[second].T).div_(self.temperature)
                if self.owners is not None:
                    self._exclude(scores, self.owners[0][first], self.owners[1][second])
                yield first, second, scores

    def _row_tiles(self) -> list[slice]:
        if self.row_shard is None:
            return tiles_of(0, len(self.rows), self.size)
        return self.row_shard.tiles(len(self.rows), self.size)

    @staticmethod
    def _exclude(scores: Tensor, first: Tensor, second: Tensor) -> None:
        """Excludes the scores between rows of the same document."""
        scores.masked_fill_(first[:, None] == second[None], torch.finfo(scores.dtype).min)


def _add_exp(log_sums: Tensor, more: Tensor) -> None:
    """Replaces a by log(exp(a) + exp(b)), computed relative to the larger of the two."""
    torch.logaddexp(log_sums, more, out=log_sums)


class MetricLearningLoss:
    """A pytorch-metric-learning loss and miner, called with embeddings as `ntxent` is.

    Args:
        loss: class name in pytorch_metric_learning.losses.
        loss_arguments: arguments of the loss.
        miner: class name in pytorch_metric_learning.miners, or None.
        miner_arguments: arguments of the miner.

    Raises:
        ValueError: the loss has trainable weights (it classifies into known classes), or rejects its arguments.
    """

    def __init__(
        self, loss: str, loss_arguments: dict[str, Any], miner: str | None, miner_arguments: dict[str, Any]
    ) -> None:
        from pytorch_metric_learning import losses, miners

        try:
            self.loss = getattr(losses, loss)(**loss_arguments)
            self.miner = getattr(miners, miner)(**miner_arguments) if miner else None
        except TypeError as error:
            raise ValueError(f"objective.loss {loss} / miner {miner}: {error}") from error
        if any(True for _ in self.loss.parameters()):
            raise ValueError(
                f"objective.loss = {loss} learns class weights, but documents have no classes; choose a loss without "
                "weights"
            )

    def __call__(self, embeddings: Tensor) -> Tensor:
        """The loss of `(2M, D)` embeddings, where row i and row i + M share a label."""
        labels = torch.arange(len(embeddings) // 2, device=embeddings.device).repeat(2)
        mined = self.miner(embeddings, labels) if self.miner is not None else None
        loss: Tensor = self.loss(embeddings, labels, mined)
        return loss
