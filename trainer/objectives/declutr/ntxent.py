"""Contrastive losses over the embeddings of a whole global batch.

Legend: M anchors of the batch, D embedding size, Q queued embeddings.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.objectives.share import Share, tile_rows, tiles_of


def ntxent(
    embeddings: Tensor,
    temperature: float,
    queue: Tensor | None = None,
    tile: int | None = None,
    share: Share | None = None,
) -> Tensor:
    """Mean over the 2M terms of -log(exp(s_ij/t) / sum_k exp(s_ik/t)), k over all but i and over the queue.

    The loss and its gradient hold only a few tiles of the 2M x (2M + Q) scores at a time.

    Args:
        embeddings: `(2M, D)`, anchors first; row i and row i + M are each other's positive.
        temperature: t.
        queue: `(Q, D)` embeddings of earlier steps, negatives for every row; no gradient.
        tile: rows and columns of a tile; None: by device. The result does not depend on it.
        share: this worker's rows of M, whose gradient is computed, while that of others is 0; None: all.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        rows = F.normalize(embeddings, dim=-1)
        old = rows.new_empty(0, rows.shape[-1]) if queue is None else F.normalize(queue.to(rows.dtype), dim=-1)
        size = tile or tile_rows(rows.device)
        value: Tensor = _TiledNTXent.apply(rows, old.detach(), temperature, size, share)  # type: ignore[no-untyped-call]
        return value


class _TiledNTXent(torch.autograd.Function):
    """NT-Xent of unit rows, term i as log(1 + exp(l_i - p_i)), l_i the logsumexp of i's negatives, p_i its positive.

    Unlike softmax minus one-hot, this form and its gradient keep their precision in float32 when the positive's score
    is by far the largest and the loss is almost 0. The scores are symmetric, so without a share a tile is used for its
    rows and, transposed, for its columns.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, queue: Tensor, temperature: float, size: int, share: Share | None) -> Tensor:
        if share is None:
            log_sums = _log_sums(rows, queue, temperature, size)
        else:
            (log_sums,) = share.complete(lambda: _log_sums(rows, queue, temperature, size, share)[None], rows)
        anchors, positives = rows.chunk(2)
        positive = ((anchors * positives).sum(dim=1) / temperature).repeat(2)
        ctx.save_for_backward(rows, queue, log_sums, positive)
        ctx.settings = temperature, size, share
        return -F.logsigmoid(positive - log_sums).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, queue, log_sums, positive = ctx.saved_tensors
        temperature, size, share = ctx.settings
        with torch.autocast(rows.device.type, enabled=False):
            weights = torch.sigmoid(log_sums - positive) * (upstream / (len(rows) * temperature))
            pulls = weights + weights.roll(len(rows) // 2)  # p_i is also the positive of i's partner
            gradient = -pulls[:, None] * rows.roll(len(rows) // 2, dims=0)
            for first, second, scores in _own_tiles(rows, temperature, size, share):
                pushes = (scores - log_sums[first, None]).exp_().mul_(weights[first, None])
                pushes += scores.sub_(log_sums[None, second]).exp_().mul_(weights[None, second])
                gradient[first].addmm_(pushes, rows[second])
                if share is None and second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
            for first, second, scores in _queue_tiles(rows, queue, temperature, size, share):
                pushes = scores.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                gradient[first].addmm_(pushes, queue[second])
        return gradient if share is None else share.only_own(gradient), None, None, None, None


def _log_sums(rows: Tensor, queue: Tensor, temperature: float, size: int, share: Share | None = None) -> Tensor:
    """`(2M,)` logsumexp of each row's negatives; with a share, of its rows alone."""
    # The lowest finite number, not -inf: a single pair has no negatives, and its gradient must be 0, not NaN.
    log_sums = rows.new_full((len(rows),), torch.finfo(rows.dtype).min)
    for first, second, scores in _own_tiles(rows, temperature, size, share):
        _add_exp(log_sums[first], scores.logsumexp(dim=1))
        if share is None and second != first:
            _add_exp(log_sums[second], scores.logsumexp(dim=0))
    for first, _, scores in _queue_tiles(rows, queue, temperature, size, share):
        _add_exp(log_sums[first], scores.logsumexp(dim=1))
    return log_sums


def _own_tiles(
    rows: Tensor, temperature: float, size: int, share: Share | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles on and above the diagonal of the scores; a row's score with itself and its positive is the lowest number.

    On the diagonal a tile holds both (i, k) and (k, i). With a share: all columns for this worker's rows.
    """
    apart = len(rows) // 2
    parts = tiles_of(0, len(rows), size)
    for number, first in enumerate(parts if share is None else share.tiles(len(rows), size)):
        for second in parts[number:] if share is None else parts:
            scores = (rows[first] @ rows[second].T).div_(temperature)
            for distance in (0, apart, -apart):  # column - row
                # Outside the tile there is nothing to exclude, and torch would raise an error.
                if -scores.shape[0] < (offset := distance + first.start - second.start) < scores.shape[1]:
                    scores.diagonal(offset).fill_(torch.finfo(scores.dtype).min)
            yield first, second, scores


def _queue_tiles(
    rows: Tensor, queue: Tensor, temperature: float, size: int, share: Share | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of the scores of rows with queued embeddings."""
    for first in tiles_of(0, len(rows), size) if share is None else share.tiles(len(rows), size):
        for second in tiles_of(0, len(queue), size):
            yield first, second, (rows[first] @ queue[second].T).div_(temperature)


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
