"""Attention whose weights are dropped by token, as one operation of a GPU, which stays in torch.compile's graph.

Only `fitting_dropout` imports this file and its kernels, because they need Triton.

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
from declutr.trainer.model import dropout_kernel as kernels
from declutr.trainer.model.dropout import WeightDropout, attend_with_dropout, attention_words

_MOST_HEAD_SIZE = 128  # a multiprocessor's memory holds no blocks of larger heads
# Of Triton: no kernel can be generated; no compiler; no Python.h; no libcuda; no place for files.
_FAILURES = (TritonError, RuntimeError, subprocess.CalledProcessError, AssertionError, OSError)
_LEAST_WIDTH = 16  # of a matrix product
_TRIED_LENGTHS, _TRIED_HEADS, _TRIED_RATE, _TOLERANCE = (70, 3, 129), 2, 0.3, 0.02


def attend_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
    drop: WeightDropout,
) -> Tensor:
    """As `attend` (trainer/model/attention.py), with the masks of `drop`, which has keys `(T,)`."""
    if drop.rates is None:
        limits = torch.full_like(drop.keys, limit(drop.p))
        kept = torch.full_like(drop.keys, 1 / (1 - drop.p), dtype=torch.float32)
    else:
        limits, kept = drop.rates.limits, drop.rates.factors.float()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = query, key, value, bounds, drop.keys, limits, kept, drop.layer
    output: Tensor = _attend(*tensors, longest, scale, window or 0)[0]
    return output


@torch.library.custom_op("declutr::attend_dropout", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    token_keys: Tensor,
    limits: Tensor,
    kept: Tensor,
    layer: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output, and log-sums `(T, heads)` of the scores."""
    output, sums = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    drop = bounds, token_keys, limits, kept
    _launch(kernels.forward, (query, key, value, output, sums, *drop), (), layer, longest, scale, window)
    return output, sums


@torch.library.custom_op("declutr::attend_dropout_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    bounds: Tensor,
    token_keys: Tensor,
    limits: Tensor,
    kept: Tensor,
    layer: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    gradient = gradient.contiguous()
    dots = (gradient.float() * output.float()).sum(-1)
    inputs = (query, key, value, gradient, sums, dots, bounds, token_keys, limits, kept)
    of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    _launch(kernels.backward_queries, inputs, (of_query,), layer, longest, scale, window)
    _launch(kernels.backward_keys, inputs, (of_key, of_value), layer, longest, scale, window)
    return of_query, of_key, of_value


def _launch(
    kernel: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], layer: Tensor, longest: int, scale: float,
    window: int,
) -> None:  # fmt: skip
    """Starts a program for each block of 64 tokens of each span and head."""
    _, heads, size = inputs[0].shape
    words = attention_words(layer, heads, longest, inputs[0].device)
    spans = len(inputs[-4]) - 1
    grid = (triton.cdiv(longest, kernels.BLOCK), heads, spans)
    wide = max(_LEAST_WIDTH, triton.next_power_of_2(size))
    kernel[grid](*inputs, words, words.stride(0), scale, heads, *outputs, WINDOW=window, SIZE=size, WIDE=wide)


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@_attend_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *drop = inputs[:8]
    ctx.save_for_backward(query, key, value, *output, *drop)
    ctx.numbers = inputs[8:]


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None for _ in range(8))


_attend.register_autograd(_differentiate, setup_context=_keep)


def problem(head_size: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """The reason why this GPU cannot attend so, found by attending to a few tokens; or None.

    Args:
        head_size: size of an attention head.
        device: the GPU.
        dtype: type of queries, keys and values.
    """
    if head_size > _MOST_HEAD_SIZE:
        return f"the head size is {head_size}, and the kernel needs at most {_MOST_HEAD_SIZE}"
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):  # a first pass has neither
            apart = _difference(head_size, device, dtype)
    except _FAILURES as error:
        return f"Triton cannot compile or start the kernel: {type(error).__name__}: {error}"
    return None if apart <= _TOLERANCE else f"the kernel's values and gradients are wrong by {apart:.1%}"


def _difference(head_size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative difference of values and gradients to those of explicit weights in float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, sum(_TRIED_LENGTHS), _TRIED_HEADS, head_size)
    samples = torch.randn(shape, generator=generator).to(device, dtype)
    keys = torch.randint(-(2**31), 2**31, shape[1:2], generator=generator, dtype=torch.int32).to(device)
    drop = WeightDropout(torch.tensor(0), _TRIED_RATE, keys)
    bounds = [0, *accumulate(_TRIED_LENGTHS)]

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        return attend_dropout(query, key, value, starts, max(_TRIED_LENGTHS), None, None, drop)

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
