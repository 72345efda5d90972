"""Attention within packed spans, also with weights dropped by token: one operation of a GPU in torch.compile's graph.

Only `own_kernel` imports this file and its kernels, because they need Triton.

Legend: T tokens, S spans.
"""

import subprocess
from collections.abc import Callable
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = query, key, value, bounds, order
    rest = longest, scale, window or 0
    output: Tensor
    if drop is None:
        output, _ = _attend(*tensors, None, None, None, None, *rest)
        return output
    if drop.rates is None:
        limits = torch.full_like(drop.keys, limit(drop.p))
        kept = torch.full_like(drop.keys, 1 / (1 - drop.p), dtype=torch.float32)
    else:
        limits, kept = drop.rates.limits, drop.rates.factors.float()
    output, _ = _attend(*tensors, drop.keys, limits, kept, drop.layer, *rest)
    return output


@torch.library.custom_op("declutr::attend_spans", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    order: Tensor,
    token_keys: Tensor | None,
    limits: Tensor | None,
    kept: Tensor | None,
    layer: Tensor | None,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output, and log2-sums `(T, heads)` of the scores."""
    output, sums = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    spans = bounds, order, token_keys, limits, kept
    _launch(kernels.forward, (query, key, value, output, sums), spans, (), layer, longest, scale, window)
    return output, sums


@torch.library.custom_op("declutr::attend_spans_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    bounds: Tensor,
    order: Tensor,
    token_keys: Tensor | None,
    limits: Tensor | None,
    kept: Tensor | None,
    layer: Tensor | None,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    gradient, dots = gradient.contiguous(), torch.empty_like(sums)
    spans, rest = (bounds, order, token_keys, limits, kept), (layer, longest, scale, window)
    of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    # writes `dots`, which the next one reads
    inputs = query, key, value, gradient, output, sums, dots
    _launch(kernels.backward_queries, inputs, spans, (of_query,), *rest)
    _launch(kernels.backward_keys, (query, key, value, gradient, sums, dots), spans, (of_key, of_value), *rest)
    return of_query, of_key, of_value


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], spans: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...],
    layer: Tensor | None, longest: int, scale: float, window: int,
) -> None:  # fmt: skip
    """Starts a program for each block of 64 tokens of each span and head."""
    _, heads, size = inputs[0].shape
    bounds, order, *drop = spans
    assert bounds is not None
    words = bounds[None]  # in the place of tensors that are not read
    if layer is not None:
        words = attention_words(layer, heads, longest, bounds.device)
    drop = [bounds if tensor is None else tensor for tensor in drop]
    grid = (triton.cdiv(longest, kernels.BLOCK), heads, len(bounds) - 1)
    wide = max(_LEAST_WIDTH, triton.next_power_of_2(size))
    arguments = *inputs, bounds, order, *drop, words, words.stride(0), scale, heads, *outputs
    kernel[grid](*arguments, DROP=layer is not None, WINDOW=window, SIZE=size, WIDE=wide)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *spans = inputs[:9]
    ctx.save_for_backward(query, key, value, *output, *spans)
    ctx.numbers = inputs[9:]


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None for _ in range(9))


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

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        order = torch.arange(len(_TRIED_LENGTHS), dtype=torch.int32, device=device)
        return attend_spans(query, key, value, starts, order, max(_TRIED_LENGTHS), None, None, drop if drops else None)

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

    pairs = zip(values(kernel, dtype), values(explicit, torch.float32), strict=True)
    return max(float((actual.float() - expected).norm() / expected.norm()) for actual, expected in pairs)
