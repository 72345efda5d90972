"""A GPU without values: every tensor on it has a shape, a type and a device, and reading it is noted as a wait.

Import `load` before torch is used; the library comes from guard.cpp.
"""

import contextlib
import ctypes
import importlib.util
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

_ROOT = Path(__file__).resolve().parents[2]


def load(library: str) -> None:
    """Registers the device; before torch is imported, which then finds a GPU."""
    [folder] = importlib.util.find_spec("torch").submodule_search_locations
    for path in (f"{folder}/lib/libc10.so", f"{folder}/lib/libtorch_cpu.so", library):
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def fake_gpu() -> Iterator[Any]:
    """Lets tensors be on a GPU within the block; gives the FakeGpu, whose `waits` are places in the project's code."""
    import torch
    import torch.cuda.amp.common
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    reads = {"item": 1.0, "__float__": 1.0, "__int__": 1, "__index__": 1, "__bool__": True, "tolist": None}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gpu = torch.device("cuda", 0)

    def on_gpu(value: Any) -> bool:
        return isinstance(value, FakeTensor) and value.device.type == "cuda"

    # operations whose result's shape or value must be read from the GPU
    reading = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"}
    indexing = {"index", "index_put", "index_put_", "_index_put_impl_"}

    class Waits(TorchDispatchMode):
        """Counts operations that wait for the GPU; among them those that copy a tensor of the CPU to it."""

        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, kwargs = function.overloadpacket.__name__, kwargs or {}
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if self.waits(name, args, inputs, kwargs):
                self.count += 1
                if name == "_local_scalar_dense":  # a fake tensor has no value
                    return 1.0 if inputs[0].is_floating_point() else 1
            return function(*args, **kwargs)

        def waits(self, name: str, args: Any, inputs: list[Any], kwargs: dict[str, Any]) -> bool:
            if not any(isinstance(tensor, FakeTensor) for tensor in inputs):
                return False
            if name in reading or (name == "repeat_interleave" and kwargs.get("output_size") is None):
                return True
            if name in indexing and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
                return True
            return any(not isinstance(tensor, FakeTensor) and tensor.dim() > 0 for tensor in inputs)

    waits = Waits()

    class FakeGpu(TorchFunctionMode):
        """Runs operations on tensors of the CPU as they are, and those on tensors of the GPU without values."""

        def __init__(self) -> None:
            super().__init__()
            self.waits: set[str] = set()

        def note(self, name: str) -> None:
            """Notes a wait with the innermost place in the project, tests left out."""
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(_ROOT))]
            others = str(_ROOT / "tests"), "site-packages"
            place = ([f for f in frames if not any(name in f.filename for name in others)] or frames)[-1]
            self.waits.add(f"{name} at {place.filename.removeprefix(f'{_ROOT}/')}:{place.lineno}")

        def moved(self, module: Any) -> Any:
            """The module with its parameters and buffers on the GPU; shared ones stay shared."""
            copies: dict[int, Any] = {}
            for part in module.modules():
                for table in (part._parameters, part._buffers):
                    for name, value in table.items():
                        if value is not None and id(value) not in copies:
                            copies[id(value)] = copy = mode.from_tensor(value.detach()).to(gpu)
                            if isinstance(value, torch.nn.Parameter):
                                copies[id(value)] = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
                            self.originals.append(value)
                        table[name] = copies.get(id(value))
            return module

        originals: list[Any] = []  # noqa: RUF012 - ids of values that ended could come again

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            leaves, first = tree_leaves((args, kwargs)), args[0] if args else None
            involved = any(map(on_gpu, leaves))
            target = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
            kwargs.pop("pin_memory", None)
            if name == "pin_memory":
                return first
            if name in (*reads, "cpu", "numpy") and on_gpu(first):
                self.note(name)
                if name in ("cpu", "numpy"):
                    return torch.ones(first.shape, dtype=first.dtype)
                return [1.0] * first.numel() if name == "tolist" else reads[name]
            if name == "backward":  # whose recomputations are Python too
                options = {"allow_unreachable": True, "accumulate_grad": True}
                with self:
                    run = torch.autograd.graph._engine_run_backward
                    return run((first,), (torch.ones_like(first),), False, False, (), **options)
            if (name == "nonzero" or (name == "where" and len(args) == 1)) and on_gpu(first):
                self.note(name)
                with unset_fake_temporarily():
                    places = torch.ones(first.shape).nonzero(as_tuple=name == "where" or bool(kwargs.get("as_tuple")))
                return tree_map(lambda place: mode.from_tensor(place).to(gpu), places)
            if name == "copy_" and involved and not on_gpu(first):
                if not kwargs.get("non_blocking"):
                    self.note(name)
                with unset_fake_temporarily():
                    return first.fill_(1)
            if name == "to" and target and not involved and isinstance(first, torch.Tensor):
                if not kwargs.get("non_blocking"):
                    self.note(name)
                return mode.from_tensor(first).to(gpu, *(leaf for leaf in leaves if isinstance(leaf, torch.dtype)))
            if target and function in (torch.tensor, torch.as_tensor):
                self.note(name)
            if not involved and not target:
                with unset_fake_temporarily():
                    return function(*args, **kwargs)
            before = waits.count
            result = function(*args, **kwargs)
            if waits.count > before:
                self.note(name)
            return result

    device = FakeGpu()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        hardware: dict[str, Any] = {"is_bf16_supported": lambda *_, **__: True, "Event": Mock}
        hardware |= {"get_rng_state": lambda *_: None, "set_rng_state": lambda *_: None}
        hardware |= {"get_device_capability": lambda *_: (9, 0)}
        for name, value in hardware.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for each in (mode, waits, device):
            stack.enter_context(each)
        yield device
