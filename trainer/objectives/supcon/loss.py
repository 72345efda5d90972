"""Contrastive loss with several positives, in tiles.

Legend: N rows, D embedding size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from declutr.trainer.objectives.row_shard import RowShard, tile_rows, tiles_of


def supcon(
    embeddings: Tensor, labels: Tensor, temperature: float, tile: int | None = None, row_shard: RowShard | None = None
) -> Tensor:
    """Mean over i of -1/|P_i| sum_{p in P_i} log(exp(s_ip) / sum_{a != i} exp(s_ia)), s_ij = cos(z_i, z_j) / t.

    L_out of Khosla et al. (2020), eq. 2. P_i are the other rows with the label of i. With each label on two rows it is
    NT-Xent. The loss and its gradient hold a few tiles of the N x N scores at a time.

    Args:
        embeddings: `(N, D)`.
        labels: `(N,)` int64; every label has at least two rows.
        temperature: t.
        tile: rows and columns of a tile; None: by device. The result does not depend on it.
        row_shard: this worker's rows, whose gradient is computed, while that of others is 0; None: all.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        rows = F.normalize(embeddings, dim=-1)
        size = tile or tile_rows(rows.device)
        value: Tensor = _TiledSupCon.apply(rows, labels, temperature, size, row_shard)  # type: ignore[no-untyped-call]
        return value


class _TiledSupCon(torch.autograd.Function):
    """The loss of unit rows. Scores are symmetric, so a tile serves its rows and, without a row shard, its columns."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None
    ) -> Tensor:
        if row_shard is None:
            log_sums, positive, counts = _sums(rows, labels, temperature, size)
        else:
            log_sums, positive, counts = row_shard.complete(
                lambda: torch.stack(_sums(rows, labels, temperature, size, row_shard)), rows, numbers=3
            )
        ctx.save_for_backward(rows, labels, log_sums, counts)
        ctx.settings = temperature, size, row_shard
        return (log_sums - positive / counts).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, labels, log_sums, counts = ctx.saved_tensors
        temperature, size, row_shard = ctx.settings
        gradient = torch.zeros_like(rows)
        factor = upstream / (len(rows) * temperature)
        with torch.autocast(rows.device.type, enabled=False):
            for first, second, scores, same in _tiles(rows, labels, temperature, size, row_shard):
                pushes = (scores - log_sums[first, None]).exp_() - same / counts[first, None]
                pushes += (scores - log_sums[None, second]).exp_() - same / counts[None, second]
                pushes *= factor
                # On the diagonal, the transposed scores are in the same tile.
                gradient[first].addmm_(pushes, rows[second])
                if row_shard is None and second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
        return gradient, None, None, None, None


def _sums(
    rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(N,)` logsumexp of each row's scores, sum of its positives' scores, their number; or of a row shard alone."""
    log_sums = rows.new_full((len(rows),), torch.finfo(rows.dtype).min)
    positive, counts = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    for first, second, scores, same in _tiles(rows, labels, temperature, size, row_shard):
        for part, axis in ((first, 1), (second, 0)) if row_shard is None and first != second else ((first, 1),):
            torch.logaddexp(log_sums[part], scores.logsumexp(dim=axis), out=log_sums[part])
            positive[part] += scores.where(same, 0).sum(dim=axis)
            counts[part] += same.sum(dim=axis)
    return log_sums, positive, counts


def _tiles(
    rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Tiles on and above the diagonal: scores, the lowest number for a row with itself, and the mask of positives.

    With a row shard: all columns for this worker's rows.
    """
    parts = tiles_of(0, len(rows), size)
    for number, first in enumerate(parts if row_shard is None else row_shard.tiles(len(rows), size)):
        for second in parts[number:] if row_shard is None else parts:
            scores = (rows[first] @ rows[second].T).div_(temperature)
            same = labels[first, None] == labels[None, second]
            if -scores.shape[0] < (offset := first.start - second.start) < scores.shape[1]:
                scores.diagonal(offset).fill_(torch.finfo(scores.dtype).min)
                same.diagonal(offset).fill_(False)
            yield first, second, scores, same


def by_rank_of_class(first: Tensor, second: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Cross entropy over cos(f1_i, f2_j) / t, whose target is the rank of i's label among the labels of the batch.

    `new_supcon` of the released VisualCSE: the target is i's own second view, or one of its class, only by chance.

    Args:
        first: `(M, D)` first views.
        second: `(M, D)` second views.
        labels: `(M,)` int64.
        temperature: t.
    """
    ranks = torch.unique(labels, return_inverse=True)[1]
    scores = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
    return F.cross_entropy(scores / temperature, ranks)
