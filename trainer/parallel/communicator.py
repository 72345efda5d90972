"""Exchanges of tensors between workers. Gradients equal those of one process that holds the whole batch.

Every rank computes the same global loss from gathered embeddings, so a rank's gradient with respect to its own rows is
complete. Gradients of parameters are therefore SUMMED over ranks, never averaged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from declutr.trainer.parallel import doubling
from declutr.trainer.parallel.request import Request

_BUCKET_ELEMENTS = 32 * 1024 * 1024
Kind = TypeVar("Kind", bound=Tensor)


def is_part(tensor: Tensor) -> bool:
    """True for a worker's part of a sharded tensor (a DTensor), without importing that class."""
    return hasattr(tensor, "full_tensor")


@dataclass(frozen=True)
class Communicator:
    """This process's rank among the workers, and its exchanges with them.

    Attributes:
        rank: number of this worker.
        size: number of workers; with 1 no process group is needed.
        deterministic: results must not depend on `size` in any bit.
    """

    rank: int = 0
    size: int = 1
    deterministic: bool = False

    def all_gather(self, rows: Tensor, start: int, total: int) -> Tensor:
        """Gathers all ranks' rows in the order of the global batch, `(total, D)`, differentiably.

        Args:
            rows: this rank's rows `(r, D)`; r may differ between ranks and may be 0.
            start: position of this rank's first row in the global batch.
            total: number of rows of all ranks.
        """
        if self.size == 1:
            return rows
        gathered: Tensor = _GatherRows.apply(rows, start, total)  # type: ignore[no-untyped-call]
        return gathered

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over ranks, without gradient."""
        values = values.detach().clone()
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_sum_(self, values: Tensor) -> None:
        """Replaces a tensor by its sum over ranks."""
        if self.size > 1:
            dist.all_reduce(values)

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for exchanges that have started."""
        for work in works:
            work.wait()

    def row_range(self, total: int, chunk: int) -> tuple[int, int]:
        """This rank's part [start, end) of `total` rows; chunk-aligned when the reduction is deterministic."""
        unit = chunk if self.deterministic else 1
        units = -(-total // unit)
        start, end = unit * (units * self.rank // self.size), unit * (units * (self.rank + 1) // self.size)
        return min(start, total), min(end, total)

    def all_reduce_max(self, number: int) -> int:
        """The maximum of all ranks' numbers."""
        if self.size == 1:
            return number
        return int(doubling.all_reduce(torch.tensor([number]), self.rank, self.size, torch.maximum))

    def all_reduce_counts(self, counts: Sequence[int]) -> list[int]:
        """The sums of all ranks' integers, one for each place."""
        if self.size == 1:
            return list(counts)
        sums: list[int] = doubling.all_reduce(torch.tensor(counts), self.rank, self.size, torch.add).tolist()
        return sums

    def all_reduce_or(self, requests: Request) -> Request:
        """The union of all ranks' requests, the same on every rank."""
        if self.size == 1:
            return requests
        raised = torch.tensor([requests.value])
        return Request(int(doubling.all_reduce(raised, self.rank, self.size, torch.bitwise_or)))

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces each parameter's gradient by its sum over ranks; a missing gradient counts as zero.

        The backward has already summed gradients of sharded parameters (trainer/parallel/sharding.py).
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.size == 1:
            return
        own = [p.grad for p in parameters if p.grad is not None and not is_part(p)]
        for bucket in grouped(own, _BUCKET_ELEMENTS):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def grouped(tensors: Iterable[Kind], limit: int, size: Callable[[Tensor], int] = Tensor.numel) -> list[list[Kind]]:
    """Groups consecutive tensors of one type up to a size, so that few large messages are sent; a larger one is alone.

    Args:
        tensors: the tensors.
        limit: largest sum of the sizes in a group.
        size: size of a tensor.
    """
    groups: list[list[Kind]] = []
    filled = 0
    for tensor in tensors:
        if not groups or filled + size(tensor) > limit or groups[-1][0].dtype != tensor.dtype:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size(tensor)
    return groups


class _GatherRows(torch.autograd.Function):
    """Copies each rank's rows into a table of zeros and sums the tables: exact for any numbers of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, start: int, total: int) -> Tensor:
        ctx.span = (start, start + len(rows))
        table = rows.new_zeros(total, *rows.shape[1:])
        table[start : start + len(rows)] = rows
        dist.all_reduce(table)
        return table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start, end = ctx.span
        return gradients[0][start:end], None, None
