"""Exchanges of tensors between workers. Gradients equal those of one process that holds the whole batch.

Every rank computes the same global loss from gathered embeddings, so a rank's gradient with respect to its own rows is
complete. Gradients of parameters are therefore SUMMED over ranks, never averaged.

`shard` shards parameters, gradients and moments over the workers, with FSDP2 around every layer of the encoder. A
sharded layer's forward and backward are exchanges. Every worker must take part equally often and with gradients for the
same parameters. Three rules ensure that for any share of the batch:

- Every batch in a sharded encoder includes a blank span (`SpanBatch.with_blank`) whose gradient is exactly zero. So
  every layer and head takes part, even without documents or without a token to predict.
- A worker with fewer microbatches than another runs empty ones (`TrainTask`, `compute_together`).
- Everything else works on whole tensors. A sharded run saves the same files as an unsharded one.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from declutr.trainer.data.plan import part_of
from declutr.trainer.model.encoder import Encoder

_BUCKET_ELEMENTS = 32 * 1024 * 1024  # 128 MiB of float32: messages few enough, and a second copy of the gradients small
Kind = TypeVar("Kind", bound=Tensor)


class Request(enum.IntFlag):
    """A worker's requests in a step; all workers carry out what any of them requests."""

    SAVE = 1  # save a checkpoint of the step
    STOP = 2  # save and stop: a signal came, or a machine is about to be removed
    FAIL = 4  # stop without a checkpoint, because checkpoints cannot be written
    EARLY = 8  # save and end the run, because its scores no longer improve
    REPORT = 16  # report a written checkpoint to Ray Train
    MEMORY = 32  # repeat the step with smaller microbatches, because memory ran out


@dataclass
class Agreement:
    """Requests that travel with the exchange in which workers agree whether a step fitted their memory."""

    requests: Callable[[], Request]  # returns this worker's requests
    agreed: Request | None = None  # the requests of all workers; None before the exchange, and with one worker


def is_part(tensor: Tensor) -> bool:
    """True for a worker's part of a sharded tensor (a DTensor), without importing that class."""
    return hasattr(tensor, "full_tensor")


@dataclass(frozen=True)
class Communicator:
    """This process's rank among the workers, and its exchanges with them."""

    rank: int = 0  # number of this worker
    size: int = 1  # number of workers; with 1 no process group is needed
    deterministic: bool = False  # results must not depend on `size` in any bit

    def all_gather(
        self,
        rows: Tensor,  # this rank's rows `(r, D)`; r may differ between ranks and may be 0
        start: int,  # position of this rank's first row in the global batch
        total: int,  # number of rows of all ranks
    ) -> Tensor:
        """Gathers all ranks' rows in the order of the global batch, `(total, D)`, differentiably."""
        if self.size == 1:
            return rows
        return _GatherRows.apply(rows, start, total)  # type: ignore[no-untyped-call]

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over ranks, without gradient."""
        values = values.detach().clone()  # all_reduce works in place
        self.all_reduce_sum_(values)
        return values

    def all_reduce_sum_(self, values: Tensor) -> None:
        """Replaces a tensor by its sum over ranks."""
        if self.size > 1:
            dist.all_reduce(values)

    def row_range(self, total: int, chunk: int) -> tuple[int, int]:
        """This rank's part [start, end) of `total` rows; chunk-aligned when the reduction is deterministic."""
        return part_of(total, chunk if self.deterministic else 1, self.rank, self.size)

    def all_reduce_max(self, number: int) -> int:
        """The maximum of all ranks' numbers."""
        return int(reduce_by_doubling(torch.tensor([number]), self.rank, self.size, torch.maximum))

    def all_reduce_counts(self, counts: Sequence[int]) -> list[int]:
        """The sums of all ranks' integers, one for each place."""
        return reduce_by_doubling(torch.tensor(counts), self.rank, self.size, torch.add).tolist()

    def all_reduce_or(self, requests: Request) -> Request:
        """The union of all ranks' requests, the same on every rank."""
        raised = torch.tensor([requests.value])  # on the CPU: requests need no GPU and no wait for it
        return Request(int(reduce_by_doubling(raised, self.rank, self.size, torch.bitwise_or)))

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replaces gradients by their sums over ranks (missing: zero); the backward has summed those of shards."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # every rank must send the same buckets
        if self.size == 1:
            return
        own = [p.grad for p in parameters if p.grad is not None and not is_part(p)]
        for bucket in grouped(own, _BUCKET_ELEMENTS):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def grouped(
    tensors: Iterable[Kind],  # the tensors
    limit: int,  # largest sum of the sizes in a group
    size: Callable[[Tensor], int] = Tensor.numel,  # size of a tensor
) -> list[list[Kind]]:
    """Groups consecutive tensors of one type up to a size, so that messages are few and large; a larger one alone."""
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
        table = rows.new_zeros(total, *rows.shape[1:])  # adding zeros changes no row
        table[start : start + len(rows)] = rows
        dist.all_reduce(table)
        return table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start, end = ctx.span
        return gradients[0][start:end], None, None  # complete, as every rank computes the whole loss


def reduce_by_doubling(values: Tensor, rank: int, size: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combines a tensor of all ranks by recursive doubling (Thakur, Rabenseifner and Gropp 2005).

    It takes log2(ranks) rounds, none with one rank; gloo's ring takes 2 (ranks - 1), 2,046 among 1,024 ranks.
    In round k, ranks whose numbers differ in bit k exchange what they have combined so far. Of a number of ranks that
    is no power of two, the last ones give theirs to a partner before the first round and get the result after the last.
    Values are integers on the CPU, of one shape on every rank; `combine` is associative and commutative, such as
    `torch.add`, so the order has no effect.
    """
    paired = 1 << (size.bit_length() - 1)  # the largest power of two that is not above the number of ranks
    if rank >= paired:
        dist.send(values, rank - paired)
        return _received(values, rank - paired)  # the result
    if rank + paired < size:
        values = combine(values, _received(values, rank + paired))
    distance = 1
    while distance < paired:
        partner = rank ^ distance
        sent = dist.isend(values, partner)
        values, own = combine(values, _received(values, partner)), values  # `own` lives until it is sent
        if sent is not None:
            sent.wait()
        del own
        distance *= 2
    if rank + paired < size:
        dist.send(values, rank + paired)
    return values


def _received(like: Tensor, source: int) -> Tensor:
    received = torch.empty_like(like)
    dist.recv(received, source)
    return received


def shard(
    encoder: Encoder,  # whole and the same on every worker; changed in place. With one worker it is left unchanged.
    comm: Communicator,  # the workers
) -> None:
    """Shards every parameter over the workers. Call it before the optimizer is made, with a process group.

    Layers are gathered one by one. Embeddings, the MLM head (tied to them) and the projection are gathered together.
    """
    if comm.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    # One dimension: parts over all workers.
    mesh = init_device_mesh(next(encoder.parameters()).device.type, (comm.size,))
    layers = [module for module in encoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, encoder]:
        # the outermost too: outside a forward, parameters are always sharded
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in encoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum over workers, see trainer/parallel/communicator.py
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    register_fsdp_forward_method(encoder, "embed")
    encoder.sharded = True


def full_tensor(tensor: Any) -> Tensor:
    """The whole tensor on every worker; every worker must call this. An unsharded tensor is returned unchanged."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def shard_like(value: Tensor, parameter: Any) -> Tensor:
    """Converts a whole tensor to the form of its parameter: the worker's part if the parameter is sharded."""
    value = value.to(parameter.device)
    if not is_part(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    # every worker has read the same values, so nothing is sent
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
