"""All-reduces of a few integers in log2(ranks) rounds; gloo's ring takes 2 (ranks - 1), 2,046 among 1,024 ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(values: Tensor, rank: int, size: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combines a tensor of all ranks by recursive doubling (Thakur, Rabenseifner and Gropp 2005).

    In round k, ranks whose numbers differ in bit k exchange what they have combined so far. Of a number of ranks that
    is no power of two, the last ones give theirs to a partner before the first round and get the result after the last.

    Args:
        values: integers on the CPU, of one shape on every rank.
        rank: number of this rank.
        size: number of ranks.
        combine: associative and commutative, such as `torch.add`; exact for integers, so the order has no effect.
    """
    paired = 1 << (size.bit_length() - 1)  # the largest power of two that is not above the number of ranks
    if rank >= paired:
        dist.send(values, rank - paired)
        result = torch.empty_like(values)
        dist.recv(result, rank - paired)
        return result
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
