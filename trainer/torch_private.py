"""The only use of torch's private names; tests/trainer/test_imports.py names one that a later version lacks."""

from typing import Any

import torch
from torch import Tensor


def multiply_all(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiplies tensors in place, in one kernel."""
    torch._foreach_mul_(tensors, factor)  # torch's own optimizers and clipping use it


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors into others, which may have another type, in a few kernels."""
    torch._foreach_copy_(targets, sources)


def versions(tensors: list[Tensor]) -> int:
    """A number that grows when a tensor changes in place; torch's fused optimizers count no change themselves."""
    return sum(tensor._version for tensor in tensors)


def fused_adamw(*tensors: list[Tensor], **settings: Any) -> None:
    """AdamW's update in one kernel, as `torch.optim.AdamW(fused=True)` calls it; here with a step of our own."""
    torch._fused_adamw_(*tensors, **settings)


def raise_recompile_limit(graphs: int) -> None:
    """Lets Dynamo keep at least this many graphs of a function, before it runs the function without one."""
    torch._dynamo.config.recompile_limit = max(graphs, torch._dynamo.config.recompile_limit)


def can_pack_linear(dtype: torch.dtype) -> bool:
    """True if torch has oneDNN with packed weights of this type on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: Tensor, rows: int) -> Tensor:
    """A weight `(out, in)` in the layout that oneDNN prefers for inputs of about this many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def packed_linear(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`inputs @ weight.T + bias` with a weight of `pack_linear`."""
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
