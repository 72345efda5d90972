"""Cross entropy of one-directional scores, in tiles.

Legend: N queries, C columns, D embedding size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from declutr.trainer.objectives.row_shard import RowShard, tile_rows, tiles_of


def infonce(
    queries: Tensor,
    columns: Tensor,
    temperature: float,
    own_weight: float = 0.0,
    tile: int | None = None,
    row_shard: RowShard | None = None,
) -> Tensor:
    """Mean over i of -log(exp(s_ii) / sum_j exp(s_ij)), s_ij = cos(q_i, c_j) / t + w [j = i + N].

    SimCSE eq. 1 without, eq. 5 with a second block of N columns, the hard negatives. The loss and its gradient hold a
    few tiles of the N x C scores at a time.

    Args:
        queries: `(N, D)`.
        columns: `(N, D)` positives, or `(2N, D)` positives and hard negatives.
        temperature: t.
        own_weight: w, added to the logit of a query's own hard negative.
        tile: rows and columns of a tile; None: by device. The result does not depend on it.
        row_shard: this worker's rows of N, whose gradient is computed, while that of others is 0; None: all.
    """
    with torch.autocast(queries.device.type, enabled=False):
        dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
        rows, unit_columns = (F.normalize(tensor.to(dtype), dim=-1) for tensor in (queries, columns))
        settings = temperature, own_weight, tile or tile_rows(rows.device), row_shard
        value: Tensor = _TiledInfoNCE.apply(rows, unit_columns, *settings)  # type: ignore[no-untyped-call]
        return value


class _TiledInfoNCE(torch.autograd.Function):
    """The loss of unit rows, term i as log(1 + exp(l_i - s_ii)), l_i the logsumexp of i's negatives.

    This form and its gradient keep their precision in float32 when the positive's score is by far the largest.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        temperature: float,
        own_weight: float,
        size: int,
        row_shard: RowShard | None,
    ) -> Tensor:
        scored = rows, columns, temperature, own_weight, size
        if row_shard is None:
            log_sums = _log_sums(*scored)
        else:
            (log_sums,) = row_shard.complete(lambda: _log_sums(*scored, row_shard.tiles(len(rows), size))[None], rows)
        positive = (rows * columns[: len(rows)]).sum(dim=1) / temperature
        ctx.save_for_backward(rows, columns, log_sums, positive)
        ctx.settings = temperature, own_weight, size, row_shard
        return -F.logsigmoid(positive - log_sums).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, columns, log_sums, positive = ctx.saved_tensors
        temperature, own_weight, size, row_shard = ctx.settings
        with torch.autocast(rows.device.type, enabled=False):
            weights = torch.sigmoid(log_sums - positive) * (upstream / (len(rows) * temperature))
            to_rows = -weights[:, None] * columns[: len(rows)]
            to_columns = torch.zeros_like(columns)
            to_columns[: len(rows)] = -weights[:, None] * rows
            scored = rows, columns, temperature, own_weight, size
            if row_shard is None:
                for first, second, scores in _tiles(*scored):
                    pushes = scores.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                    to_rows[first].addmm_(pushes, columns[second])
                    to_columns[second].addmm_(pushes.T, rows[first])
                return to_rows, to_columns, None, None, None, None
            for first, second, scores in _tiles(*scored, row_shard.tiles(len(rows), size)):
                pushes = scores.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                to_rows[first].addmm_(pushes, columns[second])
            for first, second, scores in _tiles(*scored, None, row_shard.tiles(len(columns), size)):
                pushes = scores.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                to_columns[second].addmm_(pushes.T, rows[first])
        return row_shard.only_own(to_rows), row_shard.only_own(to_columns), None, None, None, None


def _log_sums(
    rows: Tensor, columns: Tensor, temperature: float, own_weight: float, size: int, firsts: list[slice] | None = None
) -> Tensor:
    """`(N,)` logsumexp of the negatives of each query, or of those in `firsts`."""
    # The lowest finite number, not -inf: a single query has no negatives, and its gradient must be 0, not NaN.
    log_sums = rows.new_full((len(rows),), torch.finfo(rows.dtype).min)
    for first, _, scores in _tiles(rows, columns, temperature, own_weight, size, firsts):
        torch.logaddexp(log_sums[first], scores.logsumexp(dim=1), out=log_sums[first])
    return log_sums


def _tiles(
    rows: Tensor,
    columns: Tensor,
    temperature: float,
    own_weight: float,
    size: int,
    firsts: list[slice] | None = None,
    seconds: list[slice] | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of the scores of some queries and columns, or of all; a query's score with its positive is the lowest."""
    for first in tiles_of(0, len(rows), size) if firsts is None else firsts:
        for second in tiles_of(0, len(columns), size) if seconds is None else seconds:
            scores = (rows[first] @ columns[second].T).div_(temperature)
            for column, change in ((0, None), (len(rows), own_weight)):  # column - row
                offset = column + first.start - second.start
                if -scores.shape[0] < offset < scores.shape[1]:
                    diagonal = scores.diagonal(offset)
                    diagonal.fill_(torch.finfo(scores.dtype).min) if change is None else diagonal.add_(change)
            yield first, second, scores
