"""Attention within packed spans, also with weights dropped by token: one operation of a GPU in torch.compile's graph.

Only `own_kernel` imports this file and its kernels, because they need Triton.

Legend: T tokens, S spans.
"""

import subprocess
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from declutr.trainer.data.packedbatch import limit
from declutr.trainer.model import span_kernels as kernels
from declutr.trainer.model.dropout import NEVER, WeightDropout, attend_with_dropout, attention_words

_MOST_HEAD_SIZE = 128  # a multiprocessor's memory holds no blocks of larger heads
# Of Triton: no kernel can be generated; no compiler; no Python.h; no libcuda; no place for files.
_FAILURES = (TritonError, RuntimeError, subprocess.CalledProcessError, AssertionError, OSError)
_LEAST_WIDTH = 16  # of a matrix product
_TRIED_LENGTHS, _TRIED_HEADS, _TRIED_RATE, _TOLERANCE = (70, 3, 129), 2, 0.3, 0.02


def attend_spans(
    tensors: list[Tensor],  # queries, keys and values; or queries `(T, 3 heads, head_dim)`, with these behind them
    bounds: Tensor,
    order: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    drop: WeightDropout | None = None,
) -> Tensor:
    """As `attend` (trainer/model/attention.py), with the masks of `drop`, which has keys `(T,)`; None: no mask.

    `order` is int32: the numbers of the S spans in the order in which they start; what follows is not read.
    """
    tensors = tensors if len(tensors) > 1 else [tensors[0].unflatten(1, (3, -1))]
    dropout: list[Tensor] = []  # not list[Tensor](), which torch.compile cannot trace
    if drop is not None and drop.rates is None:
        kept = torch.full_like(drop.keys, 1 / (1 - drop.p), dtype=torch.float32)
        dropout = [drop.keys, torch.full_like(drop.keys, limit(drop.p)), kept, drop.layer]
    elif drop is not None and drop.rates is not None:
        dropout = [drop.keys, drop.rates.limits, drop.rates.factors.float(), drop.layer]
    scale = tensors[0].shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _attend(tensors, bounds, order, dropout, longest, scale, window or 0)[0]
    return output


def _thirds(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries, keys and values `(T, heads, head_dim)`; of one tensor, `(T, 3, heads, head_dim)`, they are views."""
    return tensors if len(tensors) > 1 else tensors[0].unbind(1)


@torch.library.custom_op("declutr::attend_spans", mutates_args=())
def _attend(
    tensors: Sequence[Tensor],  # queries, keys and values, or one tensor with all
    bounds: Tensor,
    order: Tensor,
    dropout: Sequence[Tensor],  # keys, limits and factors of the tokens, and the layer's number; or nothing
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output, and log2-sums `(T, heads)` of the scores."""
    output, sums = _outputs(tensors)
    rest = bounds, order, dropout, longest, scale, window
    _launch(kernels.forward, (*_thirds(tensors), output, sums), (), *rest)
    return output, sums


@torch.library.custom_op("declutr::attend_spans_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    tensors: Sequence[Tensor],
    output: Tensor,
    sums: Tensor,
    bounds: Tensor,
    order: Tensor,
    dropout: Sequence[Tensor],
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Gradients of queries, keys and values, `(T, 3, heads, head_dim)`."""
    rest = bounds, order, dropout, longest, scale, window
    gradient, dots = gradient.contiguous(), torch.empty_like(sums)
    thirds, gradients = _thirds(tensors), _gradients(output)
    of_query, of_key, of_value = gradients.unbind(1)
    # writes `dots`, which the next one reads
    _launch(kernels.backward_queries, (*thirds, gradient, output, sums, dots), (of_query,), *rest)
    _launch(kernels.backward_keys, (*thirds, gradient, sums, dots), (of_key, of_value), *rest)
    return gradients


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], bounds: Tensor, order: Tensor,
    dropout: Sequence[Tensor], longest: int, scale: float, window: int,
) -> None:  # fmt: skip
    """Starts a program for each block of 64 tokens of each span and head."""
    _, heads, size = inputs[0].shape
    *drop, layer = dropout or (bounds, bounds, bounds, None)  # in the place of tensors that are not read
    words = bounds[None] if layer is None else attention_words(layer, heads, longest, bounds.device)
    grid = (triton.cdiv(longest, kernels.BLOCK), heads, len(bounds) - 1)
    wide = max(_LEAST_WIDTH, triton.next_power_of_2(size))
    arguments = *inputs, bounds, order, *drop, words, words.stride(0), scale, heads, inputs[0].stride(0), *outputs
    kernel[grid](*arguments, DROP=layer is not None, WINDOW=window, SIZE=size, WIDE=wide)


@_attend.register_fake
def _outputs(tensors: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    shape = tensors[0].shape[0], *tensors[0].shape[-2:]
    return tensors[0].new_empty(shape), tensors[0].new_empty(shape[:-1], dtype=torch.float32)


@_attend_backward.register_fake
def _(gradient: Tensor, tensors: Sequence[Tensor], output: Tensor, *_: Any) -> Tensor:  # noqa: ARG001
    return _gradients(output)


def _gradients(output: Tensor) -> Tensor:
    return output.new_empty(output.shape[0], 3, *output.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, bounds, order, dropout, *ctx.numbers = inputs
    ctx.thirds = len(tensors)
    ctx.save_for_backward(*output, bounds, order, *tensors, *dropout)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    output, sums, bounds, order, *rest = ctx.saved_tensors
    tensors, dropout = rest[: ctx.thirds], rest[ctx.thirds :]
    gradients = _attend_backward(gradient, tensors, output, sums, bounds, order, dropout, *ctx.numbers)
    of_tensors = [gradients] if len(tensors) == 1 else list(gradients.unbind(1))
    return of_tensors, None, None, [None] * len(dropout), None, None, None


_attend.register_autograd(_differentiate, setup_context=_keep)


def problem(
    head_size: int,  # size of an attention head
    device: torch.device,  # the GPU
    drops: bool = True,  # weights are dropped
    dtype: torch.dtype = torch.bfloat16,  # type of queries, keys and values
) -> str | None:
    """The reason why this GPU cannot attend so, found by attending to a few tokens; or None."""
    if head_size > _MOST_HEAD_SIZE:
        return f"the head size is {head_size}, and the kernel needs at most {_MOST_HEAD_SIZE}"
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):  # a first pass has neither
            apart = _difference(head_size, device, drops, dtype)
    except _FAILURES as error:
        return f"Triton cannot compile or start the kernel: {type(error).__name__}: {error}"
    return None if apart <= _TOLERANCE else f"the kernel's values and gradients are wrong by {apart:.1%}"


def _difference(head_size: int, device: torch.device, drops: bool, dtype: torch.dtype) -> float:
    """Largest relative difference of values and gradients to those of explicit weights in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, sum(_TRIED_LENGTHS), _TRIED_HEADS, head_size)
    samples = torch.randn(shape, generator=generator).to(device, dtype)
    keys = torch.randint(-(2**31), 2**31, shape[1:2], generator=generator, dtype=torch.int32).to(device)
    drop = WeightDropout(torch.tensor(0), _TRIED_RATE if drops else NEVER, keys)
    bounds = [0, *accumulate(_TRIED_LENGTHS)]

    def kernel(*tensors: Tensor) -> Tensor:
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        order = torch.arange(len(_TRIED_LENGTHS), dtype=torch.int32, device=device)
        return attend_spans([*tensors], starts, order, max(_TRIED_LENGTHS), None, None, drop if drops else None)

    def packed(*tensors: Tensor) -> Tensor:
        return kernel(torch.cat(tensors, 1))

    def explicit(*tensors: Tensor) -> Tensor:
        outputs = []
        for start, end in pairwise(bounds):
            query, key, value = (tensor[start:end].transpose(0, 1)[None] for tensor in tensors)
            of_span = drop.rearranged(lambda rows, start=start, end=end: rows[None, start:end])  # type: ignore[misc]
            outputs.append(attend_with_dropout(query, key, value, None, None, of_span)[0].transpose(0, 1))
        return torch.cat(outputs)

    def values(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        *inputs, upstream = (tensor.to(dtype).requires_grad_() for tensor in samples)
        output = attend(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]

    expected = values(explicit, torch.float32)
    pairs = [pair for attend in (kernel, packed) for pair in zip(values(attend, dtype), expected, strict=True)]
    return max(float((actual.float() - exact).norm() / exact.norm()) for actual, exact in pairs)
