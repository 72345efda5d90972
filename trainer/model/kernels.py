"""torch's attention kernel for spans of different lengths: which devices and encoders it fits, and its call.

It is part of torch.compile's graph. Only `fitting_kernels` imports this file, because few runs need it.

Choice of the attention kernels of a GPU: by its compute capability, the size of a head, and a trial.
"""

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from declutr.common.console.logs import get_logger
from declutr.trainer.model.dropout import WeightDropout


class Kernels(NamedTuple):
    """Kernels of a GPU, each of which computes the attention of all spans in one call.

    Attributes:
        attend: trainer/model/kernels.py.
        attend_dropout: trainer/model/dropout_attention.py, which drops weights; None: groups do.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]
    attend_dropout: (
        Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None, WeightDropout], Tensor] | None
    ) = None


def fitting_kernels(model: torch.nn.Module, device: torch.device, drops: bool) -> Kernels | None:
    """The kernels for an encoder's attention on a device; a line in the log says which a GPU cannot use.

    Args:
        model: the encoder.
        device: its device.
        drops: attention weights are dropped.
    """
    if device.type != "cuda":
        return None
    from declutr.trainer.model import kernels

    config: Any = model.config
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    capability = torch.cuda.get_device_capability(device)
    if problem := kernels.problem(capability, head_size):
        _tell(f"attention computes spans of similar length together, which is slower: {problem}")
        return None
    kernels.use_newest(capability, head_size, device)
    return Kernels(kernels.attend, fitting_dropout(head_size, device) if drops else None)


def fitting_dropout(head_size: int, device: torch.device) -> Any:
    """The kernel that drops attention weights; None, with a line in the log, if it does not work on the device."""
    problem = "the package triton is missing; install torch for CUDA"
    if find_spec("triton") is not None:
        from declutr.trainer.model import dropout_attention

        failure = dropout_attention.problem(head_size, device)
        if failure is None:
            return dropout_attention.attend_dropout
        problem = failure
    _tell(f"attention dropout stores the weights of some spans at a time, which is slower: {problem}")
    return None


@lru_cache
def _tell(message: str) -> None:
    """Logs a message once in a process, which may have several encoders."""
    get_logger().warning("%s", message)


_LEAST_CAPABILITY = (8, 0)  # Ampere
_HOPPER = 9
_OTHER_VERSION = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""Errors of a package whose functions have other arguments."""
_MOST_HEAD_SIZE = 256
_HEAD_SIZE_UNIT = 8


def attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Attention within spans, `(T, heads, head_dim)`, in one call for all spans.

    Args:
        query: `(T, heads, head_dim)` queries in half precision.
        key: keys of the same shape.
        value: values of the same shape.
        bounds: `(S + 1,)` int32 start of each span, and the end of the last.
        longest: at least the tokens of the longest span.
        scaling: factor of the scores; None means 1 / sqrt(head_dim).
        window: w of |i - j| < w; None: the whole span.
    """
    reach = -1 if window is None else window - 1
    output = varlen_attn(query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(reach, reach))
    assert isinstance(output, Tensor)
    return output


def problem(capability: tuple[int, int], head_size: int) -> str | None:
    """The reason why the kernel cannot run, or None.

    Args:
        capability: compute capability of the GPU.
        head_size: size of an attention head.
    """
    if capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernel needs 8.0"
    if head_size % _HEAD_SIZE_UNIT or head_size > _MOST_HEAD_SIZE:
        return f"the head size is {head_size}, and the kernel needs a multiple of 8 up to 256"
    return None


def use_newest(capability: tuple[int, int], head_size: int, device: torch.device) -> str:
    """Lets torch use FlashAttention 3 on Hopper if its package is installed and works; returns the version in use."""
    offered = "FA3" in list_flash_attention_impls() and importlib.util.find_spec("flash_attn_interface") is not None
    if capability[0] != _HOPPER or not offered:
        return "FA2"
    try:
        activate_flash_attention_impl("FA3")
        _try(head_size, device)
    except _OTHER_VERSION as error:
        restore_flash_attention_impl()
        get_logger().warning("attention uses FlashAttention 2: version 3 fails (%s: %s)", type(error).__name__, error)
        return "FA2"
    return "FA3"


def _try(head_size: int, device: torch.device) -> None:
    """Attends within two spans, forward and backward."""
    query, key, value = torch.ones(3, 6, 1, head_size, device=device, dtype=torch.bfloat16).requires_grad_().unbind()
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    with torch.enable_grad():
        attend(query, key, value, bounds, 4, None, None).sum().backward()
