"""A worker's share of a contrast: the scores of its rows with all rows, in tiles.

The gradient with respect to a row needs the scores of that row and one number of every other row, its log-sum. Workers
exchange the log-sums. Then each computes the complete gradient of its rows, and no gradients are exchanged. With M rows
and W workers, a worker computes M^2 / W scores.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from declutr.trainer.parallel.communicator import Communicator

SHARED_ROWS = 1024
"""Most rows of a contrast that every worker computes whole. The scores of fewer rows cost less than an exchange."""
_CPU_TILE = 1024  # 4 MiB of scores in float32; larger products are hardly faster
_GPU_TILE = 4096  # 64 MiB; smaller products leave most of a GPU idle


def tile_rows(device: torch.device) -> int:
    """Rows and columns of the scores that are computed at a time."""
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def tiles_of(start: int, end: int, size: int) -> list[slice]:
    """Cuts [start, end) into slices of at most `size`."""
    return [slice(first, min(first + size, end)) for first in range(start, end, size)]


@dataclass(frozen=True)
class RowShard:
    """The rows that a worker computes, in tables with one or more blocks of `total` rows, such as one for each view.

    Attributes:
        comm: the workers.
        start: first row of this worker in a block.
        end: row after its last.
        total: rows of a block, M.
    """

    comm: Communicator
    start: int
    end: int
    total: int

    def tiles(self, length: int, size: int) -> list[slice]:
        """This worker's rows of a table of `length` rows, in slices of at most `size`."""
        blocks = range(0, length, self.total)
        return [part for block in blocks for part in tiles_of(block + self.start, block + self.end, size)]

    def complete(self, compute: Callable[[], Tensor], like: Tensor, numbers: int = 1) -> Tensor:
        """Numbers `(n, k M)` of all rows, from those of each worker's rows.

        If a worker's memory runs out, it takes part in the exchange before it raises the error, so that no other waits.

        Args:
            compute: returns `(n, k M)`, in which this worker has set the numbers of its rows.
            like: `(k M, D)`, a tensor of the same type and device.
            numbers: n.
        """
        failure = None
        try:
            values = compute()
        except RuntimeError as error:
            failure, values = error, like.new_full((numbers, len(like)), torch.nan)
        own = values.view(numbers, -1, self.total)[..., self.start : self.end].permute(2, 0, 1)
        all_values = self.comm.all_gather(own.contiguous(), self.start, self.total).permute(1, 2, 0)
        if failure is not None:
            raise failure
        return all_values.reshape(numbers, -1)

    def only_own(self, gradient: Tensor) -> Tensor:
        """The gradient `(k M, D)` with zeros in the rows of other workers; changed in place."""
        blocks = gradient.view(-1, self.total, gradient.shape[-1])
        blocks[:, : self.start] = 0
        blocks[:, self.end :] = 0
        return gradient
