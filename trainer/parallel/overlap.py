"""Gradient sums over workers that overlap with the backward of a step's last microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from declutr.trainer.parallel.communicator import Communicator, grouped

_BUCKET_BYTES = 32 * 2**20  # large enough for the network's full rate, small enough that the last one is soon sent


@dataclass
class Bucket:
    """Gradients that are sent together.

    Attributes:
        flat: `(n,)` gradients, one after the other; `.grad` of each parameter is a view of it.
        parameters: their parameters.
        missing: parameters whose gradient the current backward has not completed.
        sent: the compressed copy that is being summed, or `flat`.
        work: the all-reduce; None before it starts.
    """

    flat: Tensor
    parameters: list[nn.Parameter]
    missing: int = 0
    sent: Tensor | None = None
    work: Any = field(default=None)


class BucketedReducer:
    """Sums the gradients of parameters in persistent buckets.

    Buckets are sent in a fixed order, the same on every worker: from the last parameter to the first, as a backward
    completes them. A bucket is sent as soon as it and all buckets before it are complete.

    Args:
        comm: the workers.
        parameters: in the order of the forward; not sharded, of one type.
        compressed: type of the exchange, for example bfloat16; None: that of the gradients.
        bucket_bytes: size of a bucket; a larger parameter is alone in its bucket.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[nn.Parameter],
        compressed: torch.dtype | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self.comm = comm
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
        self.comm.wait([bucket.work for bucket in self.buckets if bucket.work is not None])
        for bucket in self.buckets:
            bucket.work = None
