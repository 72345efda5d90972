"""Contrastive loss with several positives, in tiles.

Legend: N rows, D embedding size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ROWS = 1024
"""Rows and columns of a tile: 4 MiB of scores in float32."""


def supcon(embeddings: Tensor, labels: Tensor, temperature: float, tile_rows: int = TILE_ROWS) -> Tensor:
    """Mean over i of -1/|P_i| sum_{p in P_i} log(exp(s_ip) / sum_{a != i} exp(s_ia)), s_ij = cos(z_i, z_j) / t.

    L_out of Khosla et al. (2020), eq. 2. P_i are the other rows with the label of i. With each label on two rows it is
    NT-Xent. The loss and its gradient hold a few tiles of the N x N scores at a time.

    Args:
        embeddings: `(N, D)`.
        labels: `(N,)` int64; every label has at least two rows.
        temperature: t.
        tile_rows: rows and columns of a tile; the result does not depend on it.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        rows = F.normalize(embeddings, dim=-1)
        value: Tensor = _TiledSupCon.apply(rows, labels, temperature, tile_rows)  # type: ignore[no-untyped-call]
        return value


class _TiledSupCon(torch.autograd.Function):
    """The loss of unit rows. Scores are symmetric, so a tile serves its rows and, transposed, its columns."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, temperature: float, tile_rows: int) -> Tensor:
        log_sums = rows.new_full((len(rows),), torch.finfo(rows.dtype).min)
        positive, counts = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
        for first, second, scores, same in _tiles(rows, labels, temperature, tile_rows):
            for part, axis in ((first, 1), (second, 0)) if first != second else ((first, 1),):
                torch.logaddexp(log_sums[part], scores.logsumexp(dim=axis), out=log_sums[part])
                positive[part] += scores.where(same, 0).sum(dim=axis)
                counts[part] += same.sum(dim=axis)
        ctx.save_for_backward(rows, labels, log_sums, counts)
        ctx.temperature, ctx.tile_rows = temperature, tile_rows
        return (log_sums - positive / counts).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        rows, labels, log_sums, counts = ctx.saved_tensors
        gradient = torch.zeros_like(rows)
        factor = upstream / (len(rows) * ctx.temperature)
        with torch.autocast(rows.device.type, enabled=False):
            for first, second, scores, same in _tiles(rows, labels, ctx.temperature, ctx.tile_rows):
                pushes = (scores - log_sums[first, None]).exp_() - same / counts[first, None]
                pushes += (scores - log_sums[None, second]).exp_() - same / counts[None, second]
                pushes *= factor
                # On the diagonal, the transposed scores are in the same tile.
                gradient[first].addmm_(pushes, rows[second])
                if second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
        return gradient, None, None, None


def _tiles(
    rows: Tensor, labels: Tensor, temperature: float, size: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Tiles on and above the diagonal: scores, the lowest number for a row with itself, and the mask of positives."""
    parts = [slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    for number, first in enumerate(parts):
        for second in parts[number:]:
            scores = (rows[first] @ rows[second].T).div_(temperature)
            same = labels[first, None] == labels[None, second]
            if first == second:
                scores.fill_diagonal_(torch.finfo(scores.dtype).min)
                same.fill_diagonal_(False)
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
