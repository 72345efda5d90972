"""Memory: the peak of this process, and the tensors of a step that grow with the batch."""

import resource
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 2**20
_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> float:
    """Start a measurement; return the MiB in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / MIB
    reset = Path("/proc/self/clear_refs")
    if reset.exists():  # Linux: the peak of this program alone; ru_maxrss also covers the program that started it
        reset.write_text("5", encoding="ascii")
        return _status("VmRSS")
    return _largest()


def peak(device: torch.device) -> float:
    """Maximum MiB in use since `reset_peak`: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / MIB
    return _status("VmHWM") if _STATUS.exists() else _largest()


def _status(name: str) -> float:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) / 1024


def _largest() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class EmbeddingState(TorchDispatchMode):
    """Counter of the bytes of tensors with a row for each span, anchor or embedding of the batch.

    Args:
        num_rows: possible numbers of rows of such a tensor.
        size: width of an embedding.

    Attributes:
        peak_bytes: maximum of bytes alive at one time.
    """

    def __init__(self, num_rows: set[int], size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._rows = num_rows
        self._size = size
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._counts(leaf):
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
                self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def _counts(self, tensor: torch.Tensor) -> bool:
        if tensor.ndim < 2 or tensor.shape[0] not in self._rows:
            return False
        return tensor[0].numel() in (self._size, 2 * self._size)  # one embedding, or an anchor's and its positive's
