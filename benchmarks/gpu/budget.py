"""Operations, bytes read and written, and host syncs of one step on a GPU, counted without a GPU.

    python -m benchmarks.gpu.budget --json OUT [--model roberta-base] [--documents 16]

The step is the trainer's own, with its optimizer, in bfloat16 with dropout of hidden states, without compilation. It
runs on fake tensors, which have shapes and types but no values. A fake tensor stands for a tensor on the GPU; every
other tensor is on the CPU. So reading a value of a fake tensor, or using a tensor of the CPU with fake ones, is what
makes the CPU wait for a real GPU. Bytes are those that kernels read and write, each tensor once for each kernel; no
cache is assumed.
"""

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import record
from benchmarks.workload import models, packed
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model import kernels
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.kernel_choice import Kernels
from declutr.trainer.model.language_model import drops_attention

_CPU = torch.device("cpu")
_SHOWN = 12
_GB = 10**9
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
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_UPLOADS = (torch.tensor, torch.as_tensor)


def measure(workload: packed.Workload, documents: int) -> dict[str, Any]:
    """Count one step."""
    batch, mode = workload.batch(0, documents), FakeTensorMode()
    with _autocast_as_on_a_gpu():
        with mode:
            train_step = workload.train_step(_encoder(workload), late=True)
            for parameter in train_step.encoder.parameters():
                parameter.grad = torch.empty_like(parameter)
        with counting(mode) as traffic:
            traffic.paused = True
            train_step.optimizer.step()  # creates its state
            faked = _faked(batch, mode)
            traffic.paused = False
            train_step.begin({"": faked}, 2)
    return {
        "tokens": batch.spans.num_tokens,
        "operations": sum(traffic.operations.values()),
        "gigabytes": round(sum(traffic.bytes.values()) / _GB, 2),
        "syncs": sum(traffic.syncs.values()),
        "waits": dict(traffic.syncs),
        "largest": {name: round(size / _GB, 2) for name, size in traffic.bytes.most_common(_SHOWN)},
    }


def _encoder(workload: packed.Workload) -> Encoder:
    """The encoder whose attention is the kernel of a GPU."""
    encoder = models.encoder(workload.size, workload.dropout, workload.seed, workload.attention_dropout)
    drops = drops_attention(encoder.model.config)
    dropping = (
        importlib.import_module("declutr.trainer.model.dropout_attention").attend_dropout if drops else None
    )  # Triton
    encoder._kernels[_CPU, drops] = Kernels(kernels.attend, dropping)
    return encoder


def _faked(batch: RankBatch, mode: FakeTensorMode) -> RankBatch:
    """The batch with fake tensors in place of those on a GPU; what is on the CPU for planning stays."""
    spans = batch.spans.moved(mode.from_tensor)
    return RankBatch(spans, batch.num_documents, batch.num_rows, digest=1)


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
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not function.is_view and name not in _FREE and any(isinstance(each, FakeTensor) for each in outputs):
            self.operations[name] += 1
            self.bytes[name] += _moved_bytes(name, inputs, outputs)
        return result


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
    found = Traffic()
    with ExitStack() as stack:
        stack.enter_context(patch.object(mode, "allow_non_fake_inputs", True))
        for each in (mode, found, HostReads(found)):
            stack.enter_context(each)
        yield found


@contextmanager
def _autocast_as_on_a_gpu() -> Iterator[None]:
    """Lets autocast compute layer norms in float32, as on a GPU; on a CPU it does not."""

    def forward(self: nn.LayerNorm, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden.float(), self.normalized_shape, self.weight, self.bias, self.eps)

    with warnings.catch_warnings(), patch.object(nn.LayerNorm, "forward", forward):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def _moved_bytes(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an operation reads and writes; each tensor once, broadcast dimensions not at all."""
    written = sum(map(_bytes, outputs))
    if name in _PICKING:
        return written * 2 + sum(map(_bytes, inputs[1:]))
    if name in _PLACING:
        return sum(map(_bytes, inputs[1:])) + _bytes(inputs[-1])
    if name in ("fill_", "zero_", "zeros_like", "full_like", "ones_like", "new_zeros", "new_full"):
        return written
    distinct = {id(each): each for each in inputs}
    return written + sum(map(_bytes, distinct.values()))


def _waits(name: str, args: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
    if not any(isinstance(each, FakeTensor) for each in inputs):
        return False
    if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return True
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [each for each in args[1] if each is not None]
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            return True
    return any(not isinstance(each, FakeTensor) and each.dim() > 0 for each in inputs)


def _bytes(tensor: Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return math.prod(int(size) for size in sizes) * tensor.element_size()


def _ones(shape: list[int]) -> Any:
    return 1.0 if not shape else [_ones(shape[1:]) for _ in range(shape[0])]


def main(arguments: list[str] | None = None) -> None:
    """Count, print and write."""
    options = record.parser("gpu.budget", __doc__)
    options.add_argument("--model", choices=models.SIZES, default="roberta-base")
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=[32, 512])
    options.add_argument("--dropout", type=float, default=0.1)
    options.add_argument("--attention-dropout", type=float, default=0.0)
    given = options.parse_args(arguments)
    workload = packed.Workload.of(
        given, "cpu", "bf16", dropout=given.dropout, attention_dropout=given.attention_dropout
    )
    figures = {
        "benchmark": "budget",
        "model": given.model,
        "documents": given.documents,
        **measure(workload, given.documents),
        **record.facts("gpu.budget", given.commit),
    }
    record.publish(figures, given.json)


if __name__ == "__main__":
    main()
