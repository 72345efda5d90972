"""Counter of the operations, bytes and waits of code that runs on fake tensors.

A fake tensor stands for a tensor on the GPU; every other tensor is on the CPU.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result has only metadata, or memory that nothing is written to.
_FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "detach",
}
# Operations that read only the rows that an index names.
_PICKING = {"embedding", "index", "index_select", "gather"}
_PLACING = {"index_put_", "index_put", "_index_put_impl_", "scatter", "index_copy"}
# Operations whose result's shape or value must be read from the GPU.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
_UNWRITTEN = {"_fused_adamw_": "grads"}  # arguments that may be written, and are not
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_UPLOADS = (torch.tensor, torch.as_tensor)


class Traffic(TorchDispatchMode):
    """Counter of the operations on fake tensors.

    Attributes:
        operations: operations that start a kernel, by name.
        bytes: bytes that they read and write, by name.
        syncs: waits for the GPU, by name.
        paused: true while nothing is counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it."""
        kwargs = kwargs or {}
        if self.paused:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _waits(name, args, inputs, kwargs):
            self.syncs[name] += 1
            if name == "_local_scalar_dense":
                return 1 if not inputs[0].is_floating_point() else 1.0  # a fake tensor has no value
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] or _written(function, args, kwargs)
        if not function.is_view and name not in _FREE and any(isinstance(output, FakeTensor) for output in outputs):
            self.operations[name] += 1
            self.bytes[name] += _moved_bytes(name, inputs, outputs)
        return result

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Counts nothing in the block."""
        before, self.paused = self.paused, True
        yield
        self.paused = before

    def add(self, counts: Counter[str]) -> None:
        """Add the operations and bytes of a planned graph."""
        for name in ("products", "compiled"):
            self.operations[name] += counts[f"{name} operations"]
            self.bytes[name] += counts[name]


class HostReads(TorchFunctionMode):
    """Counts reads of fake tensors that no dispatcher sees.

    Args:
        traffic: counter of the reads.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; a value that a fake tensor does not have is 1."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        uploads = name == "new_tensor" or (function in _UPLOADS and kwargs.get("device") is not None)
        if uploads and not self._traffic.paused:
            self._traffic.syncs[name] += 1
        if name in _READS and args and isinstance(args[0], FakeTensor) and not self._traffic.paused:
            self._traffic.syncs[name] += 1
            if name == "tolist":
                return _ones(list(args[0].shape))
            if name in ("cpu", "numpy"):
                return torch.ones(args[0].shape, dtype=args[0].dtype)
            return {"__bool__": True, "__int__": 1, "__index__": 1}.get(name, 1.0)
        return function(*args, **kwargs)


@contextmanager
def counting(mode: Any) -> Iterator[Traffic]:
    """Count what happens in the block on fake tensors of a FakeTensorMode."""
    traffic = Traffic()
    with ExitStack() as stack:
        stack.enter_context(patch.object(mode, "allow_non_fake_inputs", True))
        for context in (mode, traffic, HostReads(traffic)):
            stack.enter_context(context)
        yield traffic


def _written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that an operation without a result writes, such as those of a fused optimizer."""
    name, schema = function.overloadpacket.__name__, function._schema
    arguments = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    written = [
        arguments[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in arguments
        if argument.name != _UNWRITTEN.get(name)
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operation reads and writes; each tensor once, broadcast dimensions not at all."""
    written = sum(map(_bytes, outputs))
    if name in _PICKING:
        return written * 2 + sum(map(_bytes, inputs[1:]))
    if name in _PLACING:
        return sum(map(_bytes, inputs[1:])) + _bytes(inputs[-1])
    if name in ("fill_", "zero_", "zeros_like", "full_like", "ones_like", "new_zeros", "new_full"):
        return written
    distinct = {id(tensor): tensor for tensor in inputs}
    return written + sum(map(_bytes, distinct.values()))


def _waits(name: str, args: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
    if not any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return False
    if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [tensor for tensor in args[1] if tensor is not None]
        if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices):
            return True
    return any(not isinstance(tensor, FakeTensor) and tensor.dim() > 0 for tensor in inputs)


def _bytes(tensor: Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(int(size) for size in sizes) * tensor.element_size()


def _ones(shape: list[int]) -> Any:
    return 1.0 if not shape else [_ones(shape[1:]) for _ in range(shape[0])]
