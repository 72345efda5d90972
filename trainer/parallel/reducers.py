"""Gradient sums over workers: independent of the order of their terms, or while a backward still runs.

`FixedPointReducer`: the gradient of each canonical microbatch (trainer/data/batches.py) is rounded to a multiple of
2^-44 and added as a 64-bit integer. Sums of integers are exact in any order, so that any number of workers has the same
bits. The rounding, 3e-14, is below that of a sum in float32 for entries above 5e-7, and is small compared with AdamW's
eps for all.

`BucketedReducer`: sums overlap with the backward of a step's last microbatch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from declutr.trainer.parallel.communicator import Communicator, grouped

_BITS = 44
SCALE = 2.0**_BITS  # integers of one unit of the gradient. It is the same for every step and every number of workers.
_CHUNK = 2**20  # elements converted at a time, so that temporary memory is small
_BUCKET = 2**24  # integers of a message, 128 MiB
_BUCKET_BYTES = 32 * 2**20  # large enough for the network's full rate, small enough that the last one is soon sent


class FixedPointReducer:
    """Adds up the gradients of all microbatches of all workers.

    A hook of each parameter moves its gradient to the sums as soon as a backward has computed it, so that no parameter
    has a gradient in float32 until `finish`. Parameters have one order on every worker and are not sharded; `num_terms`
    is the largest number of terms of a sum, for all workers together.
    """

    def __init__(self, comm: Communicator, parameters: Sequence[nn.Parameter], num_terms: int) -> None:
        self.comm = comm
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.limit = 2.0 ** (63 - _BITS) / max(1, num_terms)
        """Smallest absolute value of a term's entry that is refused: sums of smaller ones cannot overflow."""
        self._sums: dict[int, Tensor] = {}
        self._buckets: list[tuple[Tensor, list[nn.Parameter]]] = []
        self._refused: Tensor | None = None
        self._active = self._ignored = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._add)

    def begin(self) -> None:
        """Sets all sums to zero, and adds what backwards compute from now on until `finish`."""
        self._active = True
        device = self.parameters[0].device
        self._refused = torch.zeros((), dtype=torch.int64, device=device)
        self._buckets = []
        for group in grouped(self.parameters, _BUCKET):
            flat = torch.zeros(sum(parameter.numel() for parameter in group), dtype=torch.int64, device=device)
            self._buckets.append((flat, group))
            parts = flat.split([parameter.numel() for parameter in group])
            self._sums.update({id(parameter): part for parameter, part in zip(group, parts, strict=True)})

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Drops gradients that are computed in the block: another worker adds the same."""
        self._ignored = True
        try:
            yield
        finally:
            self._ignored = False

    def finish(self) -> bool:
        """Sets gradients, summed over microbatches and workers; false, and NaN everywhere, if a term was refused."""
        assert self._refused is not None
        self._active = False
        self.comm.all_reduce_sum_(self._refused)
        allowed = int(self._refused) == 0
        for flat, group in self._buckets:
            self.comm.all_reduce_sum_(flat)
            for parameter in group:
                parameter.grad = self._converted(self._sums.pop(id(parameter)), parameter, allowed)
        self._buckets = []
        return allowed

    def _add(self, parameter: Tensor) -> None:
        if not self._active:  # each update of a step has separate sums
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or self._ignored or self._refused is None:
            return
        total = self._sums[id(parameter)]
        for part, places in zip(gradient.reshape(-1).split(_CHUNK), total.split(_CHUNK), strict=True):
            # false for NaN too
            self._refused += ~(torch.linalg.vector_norm(part, torch.inf) < self.limit)
            places += (part * SCALE).round_().to(torch.int64)  # exact: a product with a power of two

    @staticmethod
    def _converted(total: Tensor, like: Tensor, allowed: bool) -> Tensor:
        """The sum of a parameter's gradients in its type."""
        gradient = torch.full_like(like, torch.nan)
        if allowed:
            for part, places in zip(gradient.view(-1).split(_CHUNK), total.split(_CHUNK), strict=True):
                part.copy_(places)
                part /= SCALE
        return gradient


@dataclass
class Bucket:
    """Gradients that are sent together."""

    flat: Tensor  # `(n,)` gradients, one after the other; `.grad` of each parameter is a view of it
    parameters: list[nn.Parameter]  # their parameters
    missing: int = 0  # parameters whose gradient the current backward has not completed
    sent: Tensor | None = None  # the compressed copy that is being summed, or `flat`
    work: Any = field(default=None)  # the all-reduce; None before it starts


class BucketedReducer:
    """Sums the gradients of parameters in persistent buckets.

    Buckets are sent in a fixed order, the same on every worker: from the last parameter to the first, as a backward
    completes them. A bucket is sent as soon as it and all buckets before it are complete.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],  # in the order of the forward; not sharded, of one type
        # type of the exchange, for example bfloat16; None: that of the gradients.
        compressed: torch.dtype | None = None,
        bucket_bytes: int = _BUCKET_BYTES,  # size of a bucket; a larger parameter is alone in its bucket
    ) -> None:
        self.compressed = compressed
        self.buckets: list[Bucket] = []
        self._armed = False
        self._next = 0
        self._bucket_of: dict[int, Bucket] = {}
        own = [p for p in reversed(parameters) if p.requires_grad]
        for group in grouped(own, bucket_bytes, lambda p: p.numel() * p.element_size()):
            bucket = Bucket(group[0].new_zeros(sum(p.numel() for p in group)), group)
            self.buckets.append(bucket)
            self._bucket_of.update({id(parameter): bucket for parameter in group})
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(self._complete)

    def begin(self) -> None:
        """Sets all gradients to zero, once the sums of an interrupted step have ended."""
        self._wait()
        self._armed, self._next = False, 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.work = bucket.sent = None
            bucket.missing = len(bucket.parameters)
            sizes = [parameter.numel() for parameter in bucket.parameters]
            for parameter, part in zip(bucket.parameters, bucket.flat.detach().split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)

    def arm(self) -> None:
        """Announces the last backward of the step: from now on, complete buckets are sent."""
        self._armed = True

    def flush(self) -> None:
        """Sends the buckets that the last backward did not complete."""
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        self._next = len(self.buckets)

    def finish(self) -> None:
        """Waits until every gradient is its sum over workers."""
        self.flush()
        self._armed = False
        self._wait()
        for bucket in self.buckets:
            if bucket.sent is not None and bucket.sent is not bucket.flat:
                bucket.flat.copy_(bucket.sent)
            bucket.sent = None

    def _complete(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = bucket.flat if self.compressed is None else bucket.flat.to(self.compressed)
        bucket.work = dist.all_reduce(bucket.sent, async_op=True)

    def _wait(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = None
