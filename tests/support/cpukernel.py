"""Kernels for the CPU behind torch's variable-length attention, so that tests run the code path of a GPU."""

from itertools import pairwise

import torch
from torch.nn.attention import varlen  # noqa: F401 - defines the operations

BACKWARDS = []  # tokens of each backward of attention, in their order; a test may clear it


def _of_spans(bounds, *tensors):
    """The tensors of each span, `(heads, tokens, head_dim)` in float32."""
    for start, end in pairwise(bounds.tolist()):
        yield [tensor[start:end].float().transpose(0, 1) for tensor in tensors]


def _weights(query, key, scale, window):
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if window is not None and window[0] >= 0:
        place = torch.arange(scores.shape[-1])
        scores = scores.masked_fill((place[:, None] - place[None, :]).abs() > window[0], -torch.inf)
    return scores.softmax(-1)


@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def _forward(
    query, key, value, bounds, _bounds_k, longest, _longest_k, _causal=False, scale=None, window=None, *_, **__
):
    assert bounds.diff().max() <= longest
    parts = [(_weights(q, k, scale, window) @ v).transpose(0, 1) for q, k, v in _of_spans(bounds, query, key, value)]
    sums = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return torch.cat(parts).to(query.dtype), sums, torch.zeros(2, dtype=torch.uint64)


@torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
def _backward(
    gradient, query, key, value, _out, _lse, bounds, _bounds, _longest, _long, _causal, _rng, scale=None, window=None
):
    BACKWARDS.append(len(query))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    gradients = ([], [], [])
    for g, q, k, v in _of_spans(bounds, gradient, query, key, value):
        weights, upstream = _weights(q, k, scale, window), g @ v.mT
        scores = weights * (upstream - (weights * upstream).sum(-1, keepdim=True)) * factor
        for parts, part in zip(gradients, (scores @ k, scores.mT @ q, weights.mT @ g), strict=True):
            parts.append(part.transpose(0, 1))
    return tuple(torch.cat(parts).to(query.dtype) for parts in gradients)
