"""Operations, bytes read and written, and host syncs of one step on a GPU, counted without a GPU; computed times.

    python -m benchmarks.gpu.budget --json OUT [--model roberta-base] [--documents 16]

The step is the trainer's own, with its optimizer, in bfloat16 with dropout of hidden states. It runs on fake tensors,
which have shapes and types but no values. A fake tensor stands for a tensor on the GPU; every other tensor is on the
CPU. So reading a value of a fake tensor, or using a tensor of the CPU with fake ones, is what makes the CPU wait for a
real GPU. Bytes are those that kernels read and write, each tensor once for each kernel; no cache is assumed. Layers and
the loss of the head are compiled, as by default on a GPU (benchmarks/gpu/fusion.py); `eager` has the step without that.

`milliseconds` are computed, not measured: products of matrices and attention at `_REACHED` of the peak, and all other
bytes at `_BANDWIDTH_REACHED` of the bandwidth, one after the other. The time of a host that launches slower than the
GPU computes is `host`, at `_LAUNCH_SECONDS` an operation.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from benchmarks import record
from benchmarks.gpu.fusion import Plan, planned
from benchmarks.gpu.traffic import Traffic, counting
from benchmarks.workload import Workload, add_options
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model import encoder as encoders
from declutr.trainer.model import kernels
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.flops import peak_flops, step_flops
from declutr.trainer.model.kernel_choice import Kernels
from declutr.trainer.model.language_model import drops_attention

_CPU = torch.device("cpu")
_SHOWN = 12
_GB = 10**9
# Multiplications of matrices, whose time is that of their FLOPs.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_varlen_attn", "_varlen_attn_backward", "attend_dropout"}
_PRODUCTS |= {"attend_dropout_backward"}
_REACHED, _BANDWIDTH_REACHED, _LAUNCH_SECONDS = 0.65, 0.85, 10e-6  # assumptions, of no machine
_BANDWIDTHS = {  # bytes a second, from vendors' data sheets; names as in trainer/model/flops.py
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100": 3.35e12,
    "A100": 2.039e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
}


def measure(workload: Workload, documents: int, compiled: bool) -> dict[str, Any]:
    """Count one step."""
    batch, mode = workload.batch(0, documents), FakeTensorMode()
    with ExitStack() as stack:
        stack.enter_context(_autocast_as_on_a_gpu())
        stack.enter_context(patch.object(encoders, "_LOGITS", encoders._GPU_LOGITS))
        plan = Plan.of(_encoder(workload), [batch.tokens], workload.autocast) if compiled else None
        with mode:
            train_step = workload.train_step(_encoder(workload), late=True)
            for parameter in train_step.encoder.parameters():
                parameter.grad = torch.empty_like(parameter)
        traffic = stack.enter_context(counting(mode))
        if plan is not None:
            stack.enter_context(planned(train_step.encoder, plan, traffic))
        with traffic.pausing():
            train_step.optimizer.step()  # creates its state
            faked = _faked(batch, mode)
        train_step.begin({"": faked}, 2)
    model, weights = train_step.encoder.model, train_step.encoder.num_linear_weights
    flops = step_flops(model, weights, batch.spans.lengths, len(batch.spans.labels))
    return {
        "operations": sum(traffic.operations.values()),
        "gigabytes": round(sum(traffic.bytes.values()) / _GB, 2),
        "syncs": sum(traffic.syncs.values()),
        "graphs": plan and plan.graphs,
        "breaks": plan and plan.breaks,
        "milliseconds": _milliseconds(traffic, flops),
        "waits": dict(traffic.syncs),
        "largest": {name: round(size / _GB, 2) for name, size in traffic.bytes.most_common(_SHOWN)},
    }


def _milliseconds(traffic: Traffic, flops: float) -> dict[str, Any]:
    """Computed times of the step by GPU, with the share of the peak, and the host's time to launch its operations."""
    rest = sum(size for name, size in traffic.bytes.items() if name not in {*_PRODUCTS, "products"})
    found: dict[str, Any] = {"host": round(sum(traffic.operations.values()) * _LAUNCH_SECONDS * 1e3, 1)}
    for name, bandwidth in _BANDWIDTHS.items():
        peak = peak_flops(name, half=True)
        assert peak is not None
        products, others = flops / (_REACHED * peak), rest / (_BANDWIDTH_REACHED * bandwidth)
        seconds = products + others
        found[name] = {"products": round(products * 1e3, 1), "others": round(others * 1e3, 1)}
        found[name] |= {"step": round(seconds * 1e3, 1), "mfu": round(flops / seconds / peak, 3)}
    return found


def _encoder(workload: Workload) -> Encoder:
    """The encoder whose attention is the kernel of a GPU."""
    encoder = workload.encoder()
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


@contextmanager
def _autocast_as_on_a_gpu() -> Iterator[None]:
    """Lets autocast compute layer norms in float32, as on a GPU; on a CPU it does not."""

    def forward(self: nn.LayerNorm, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden.float(), self.normalized_shape, self.weight, self.bias, self.eps)

    with warnings.catch_warnings(), patch.object(nn.LayerNorm, "forward", forward):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def main(arguments: list[str] | None = None) -> None:
    """Count, print and write."""
    parser = record.parser("gpu.budget", __doc__)
    add_options(parser, "roberta-base", 16, (32, 512))
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    options = record.parse(parser, arguments)
    rates = {"dropout": options.dropout, "attention_dropout": options.attention_dropout}
    workload = Workload.of(options, "cpu", "bf16", **rates)
    figures = {
        "benchmark": "budget",
        "model": options.model,
        "documents": options.documents,
        "tokens": workload.batch(0, options.documents).spans.num_tokens,
        **measure(workload, options.documents, compiled=True),
        "eager": measure(workload, options.documents, compiled=False),
    }
    record.publish(figures, options)


if __name__ == "__main__":
    main()
