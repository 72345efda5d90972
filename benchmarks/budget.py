"""Operations, bytes, host syncs, graphs and graph breaks of one step on a GPU, counted without a GPU.

    python -m benchmarks.budget --json OUT [--model roberta-base] [--documents 16]

The step is the trainer's own, with its optimizer, in bfloat16 with dropout of hidden states, on fake tensors
(benchmarks/traffic.py). Its encoder is compiled, as it is by default on a GPU: Inductor plans its kernels for Triton,
and their bytes are counted (benchmarks/fusion.py). `eager` has the same step without compilation. Bytes are those that
kernels read and write, each tensor once for each kernel; no cache is assumed.
"""

import importlib
from contextlib import ExitStack
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from benchmarks import models, packed, record
from benchmarks.fusion import Plan, planned
from benchmarks.traffic import GB, autocast_as_on_a_gpu, counting
from trainer.data.batches import RankBatch
from trainer.model import kernels
from trainer.model.encoder import Encoder
from trainer.model.kernel_choice import Kernels
from trainer.model.language_model import drops_attention

_CPU = torch.device("cpu")
_SHOWN = 12


def measure(workload: packed.Workload, documents: int, compiled: bool) -> dict[str, Any]:
    """Count one step."""
    batch, mode = workload.batch(0, documents), FakeTensorMode()
    with ExitStack() as stack:
        stack.enter_context(autocast_as_on_a_gpu())
        plan = _plan(workload, documents) if compiled else Plan()
        with mode:
            stepper = workload.stepper(_encoder(workload), late=True)
            for parameter in stepper.encoder.parameters():
                parameter.grad = torch.empty_like(parameter)
        traffic = stack.enter_context(counting(mode))
        if compiled:
            stack.enter_context(planned(stepper.encoder, plan, traffic))
        traffic.paused = True
        stepper.optimizer.step()  # creates its state
        faked = _faked(batch, mode)
        traffic.paused = False
        stepper.begin(faked, 2)
    return {
        "operations": sum(traffic.operations.values()),
        "gigabytes": round(traffic.gigabytes, 2),
        "syncs": sum(traffic.syncs.values()),
        "graphs": plan.graphs,
        "breaks": plan.breaks,
        "waits": dict(traffic.syncs),
        "largest": {name: round(size / GB, 2) for name, size in traffic.bytes.most_common(_SHOWN)},
    }


def _plan(workload: packed.Workload, documents: int) -> Plan:
    """The plan of the encoder, from those of encoders with one and two layers."""
    batches = [workload.batch(0, documents).tokens, workload.batch(documents, max(1, documents // 2)).tokens]
    one, two = (Plan.of(_encoder(workload, layers), batches, workload.autocast) for layers in (1, 2))
    return one.with_layers(two, models.SIZES[workload.size]["num_hidden_layers"] - 2)


def _encoder(workload: packed.Workload, num_layers: int | None = None) -> Encoder:
    """The encoder whose attention is the kernel of a GPU."""
    given = workload.size, workload.dropout, workload.seed, workload.attention_dropout
    encoder = models.encoder(*given, num_layers=num_layers)
    drops = drops_attention(encoder.model.config)
    dropping = importlib.import_module("trainer.model.dropping_attention").attend_dropping if drops else None  # Triton
    encoder._kernels[_CPU, drops] = Kernels(kernels.attend, dropping)
    return encoder


def _faked(batch: RankBatch, mode: FakeTensorMode) -> RankBatch:
    """The batch with fake tensors in place of those on a GPU; what is on the CPU for planning stays."""
    spans = batch.spans.moved(mode.from_tensor)
    return RankBatch(spans, batch.num_documents, batch.num_rows, digest=1)


def main(arguments: list[str] | None = None) -> None:
    """Count, print and write."""
    options = record.parser("budget", __doc__)
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
        **measure(workload, given.documents, compiled=True),
        "tokens": workload.batch(0, given.documents).spans.num_tokens,
        "eager": measure(workload, given.documents, compiled=False),
        **record.facts("budget", given.commit),
    }
    record.publish(figures, given.json)


if __name__ == "__main__":
    main()
