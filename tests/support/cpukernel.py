"""Kernels for the CPU behind torch's variable-length attention, so that tests run the code path of a GPU.

The kernels of a GPU compute the same in another order. Import the file once; torch registers a kernel for a process.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401 - defines the operations

BACKWARDS: list[int] = []
"""Tokens of each backward of attention, in their order; a test may clear it."""


def _spans(bounds: Tensor) -> Iterator[slice]:
    for start, end in pairwise(bounds.tolist()):
        yield slice(start, end)


def _of_spans(bounds: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors of each span, `(heads, tokens, head_dim)` in float32."""
    for span in _spans(bounds):
        yield [each[span].float().transpose(0, 1) for each in tensors]


def _weights(query: Tensor, key: Tensor, scale: float | None, window: list[int] | None) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if window is not None and window[0] >= 0:
        place = torch.arange(scores.shape[-1])
        scores = scores.masked_fill((place[:, None] - place[None, :]).abs() > window[0], -torch.inf)
    return scores.softmax(-1)


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    bounds_k: Tensor | None,  # noqa: ARG001
    longest: int,
    longest_k: int,  # noqa: ARG001
    is_causal: bool = False,  # noqa: ARG001
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert max(span.stop - span.start for span in _spans(bounds)) <= longest
    parts = [
        (_weights(q, k, scale, window_size) @ v).transpose(0, 1) for q, k, v in _of_spans(bounds, query, key, value)
    ]
    attended = torch.cat(parts).to(query.dtype)
    sums = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return attended, sums, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    bounds: Tensor,
    bounds_k: Tensor,  # noqa: ARG001
    longest: int,  # noqa: ARG001
    longest_k: int,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    rng_state: Tensor,  # noqa: ARG001
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    BACKWARDS.append(len(query))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    found: tuple[list[Tensor], ...] = ([], [], [])
    for g, q, k, v in _of_spans(bounds, gradient, query, key, value):
        weights = _weights(q, k, scale, window_size)
        upstream = g @ v.mT
        scores = weights * (upstream - (weights * upstream).sum(-1, keepdim=True)) * factor
        for parts, part in zip(found, (scores @ k, scores.mT @ q, weights.mT @ g), strict=True):
            parts.append(part.transpose(0, 1))
    first, second, third = (torch.cat(parts).to(query.dtype) for parts in found)
    return first, second, third
