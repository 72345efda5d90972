"""Operations, bytes read and written, and host syncs of one step on a GPU, counted without a GPU; computed times.

    python -m benchmarks.gpu.budget --json OUT [--model roberta-base] [--documents 16]

The step is the trainer's own, with its optimizer, in bfloat16 with dropout of hidden states. It runs on fake tensors,
which have shapes and types but no values. A fake tensor stands for a tensor on the GPU; every other tensor is on the
CPU. So reading a value of a fake tensor, or using a tensor of the CPU with fake ones, is what makes the CPU wait for a
real GPU. Bytes are those that kernels read and write, each tensor once for each kernel; no cache is assumed. Layers and
the loss of the head are compiled, as by default on a GPU (benchmarks/gpu/budget.py); `eager` has the step without that.

`milliseconds` are computed, not measured: products of matrices and attention at `_REACHED` of the peak, and all other
bytes at `_BANDWIDTH_REACHED` of the bandwidth, one after the other. The time of a host that launches slower than the
GPU computes is `host`, at `_LAUNCH_SECONDS` an operation.

Kernels of the compiled parts of a step, planned as Inductor plans them for a GPU, counted and never generated.

Neither a GPU nor Triton is needed, because no code is generated. torch does not compile while operations are counted,
so the parts are planned alone (`Plan`), and the counted step takes their numbers (`planned`).
"""

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks import record
from benchmarks.gpu.traffic import Traffic, counting
from benchmarks.workload import Workload, add_options
from declutr.trainer.data.batches import RankBatch, SpanBatch
from declutr.trainer.model import encoder as encoders
from declutr.trainer.model.attention import Kernels, attend
from declutr.trainer.model.encoder import Encoder, drops_attention
from declutr.trainer.model.language_model import parts
from declutr.trainer.step.task import peak_flops, step_flops

HEAD = "loss of the head"


@dataclass
class Plan:
    """Kernels of an encoder's compiled parts, by the class of a part.

    Attributes:
        forward: numbers of operations and bytes of a forward: `products` of matrices and attention, and the `compiled`
            rest.
        backward: the same of a backward.
        graphs: graphs that Dynamo made.
        breaks: places where a graph had to end.
    """

    forward: dict[str, Counter[str]] = field(default_factory=dict)
    backward: dict[str, Counter[str]] = field(default_factory=dict)
    graphs: int = 0
    breaks: int = 0

    @classmethod
    def of(cls, encoder: Encoder, batches: list[SpanBatch], autocast: torch.dtype | None) -> "Plan":
        """Plan the kernels for the first batch; the others show whether another graph is made for them."""
        plan = cls()
        counters.clear()
        torch._dynamo.reset()
        modules = list(parts(encoder.model.base_model))
        backends = {kind: _Backend(plan, kind) for kind in (HEAD, *map(kind_of, modules))}  # layers of a kind share it
        for part in modules:
            part.compile(backend=backends[kind_of(part)], dynamic=True)
        loss = torch.compile(encoder._compilation.loss, backend=backends[HEAD], dynamic=True)
        for batch in batches:
            with patch.object(encoder._compilation, "loss", loss):
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    embeddings, mlm_sum = encoder(batch)
                (embeddings.sum() + mlm_sum).backward()
        plan.graphs = counters["stats"]["unique_graphs"]
        plan.breaks = sum(counters["graph_break"].values())
        return plan


def kind_of(part: nn.Module) -> str:
    """The name of the kernels of a part."""
    return type(part).__name__


@dataclass(frozen=True, eq=False)
class _Backend:
    """A backend of torch.compile that computes nothing, and writes the kernels of a part to its plan."""

    plan: Plan
    kind: str

    def __call__(self, graph: GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=self._plan_kernels)

    def _plan_kernels(self, graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        record_original_output_strides(graph)
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=False)
        environment = next((value.node.shape_env for value in inputs if isinstance(value, torch.SymInt)), ShapeEnv())
        backward = bool(options.get("is_backward", False))
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=environment, is_backward=backward)
        config = torch._inductor.config.patch(cpu_backend="triton")
        sums = patch("torch._inductor.scheduler._is_gpu_triton_backend", lambda *_: True)  # over rows and over columns
        debug, fake = V.set_debug_handler(DebugContext()), V.set_fake_mode(detect_fake_mode(inputs))
        with config, sums, debug, fake, V.set_graph_handler(lowered):
            lowered.run(*inputs)
            lowered._update_scheduler()
            nodes = [node for node in lowered.scheduler.nodes if node.get_read_write_buffers_sizes()]
            counts = Counter[str]()
            for node in nodes:
                kind = "products" if isinstance(node, ExternKernelSchedulerNode) else "compiled"
                counts[kind] += node.get_read_write_buffers_sizes()
                counts[f"{kind} operations"] += 1
        (self.plan.backward if backward else self.plan.forward).setdefault(self.kind, counts)
        return make_boxed_func(_shapes_of(graph))


def _shapes_of(graph: GraphModule) -> Callable[..., Any]:
    """A function that returns zeros with the shapes of a graph's outputs."""

    def call(*values: Any) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in values]
            outputs = graph.forward(*faked)
        return [
            torch.zeros(value.shape, dtype=value.dtype).as_strided(value.shape, value.stride())
            if isinstance(value, Tensor)
            else value
            for value in outputs
        ]

    return call


@contextmanager
def planned(encoder: Encoder, plan: Plan, traffic: Any) -> Iterator[None]:
    """Replaces forwards and backwards of the compiled parts by the counts of their plan."""
    with ExitStack() as stack:
        for part in parts(encoder.model.base_model):
            call = _counted(plan, kind_of(part), part.forward, list(part.parameters()), traffic)
            stack.enter_context(patch.object(part, "forward", call))
        compilation, model = encoder._compilation, encoder.model
        inner = {id(p) for p in model.base_model.parameters()}
        embedding = model.get_input_embeddings().weight
        head = [p for p in model.parameters() if id(p) not in inner or p is embedding]  # which is tied
        stack.enter_context(patch.object(compilation, "loss", _counted(plan, HEAD, compilation.loss, head, traffic)))
        yield


def _counted(
    plan: Plan, kind: str, forward: Callable[..., Tensor], parameters: list[nn.Parameter], traffic: Any
) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad(), traffic.pausing():
            output = forward(*args, **kwargs)
        inputs = [value for value in (*args, *kwargs.values(), *parameters) if isinstance(value, Tensor)]
        result: Tensor = _Planned.apply(plan, kind, traffic, output, *inputs)  # type: ignore[no-untyped-call]
        return result

    return call


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, kind: str, traffic: Any, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.parts = plan, kind, traffic
        ctx.save_for_backward(*inputs)
        traffic.add(plan.forward[kind])
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        plan, kind, traffic = ctx.parts
        traffic.add(plan.backward[kind])
        inputs = zip(ctx.needs_input_grad[4:], ctx.saved_tensors, strict=True)
        return None, None, None, None, *(torch.empty_like(tensor) if needed else None for needed, tensor in inputs)


_CPU = torch.device("cpu")
_SHOWN = 12
_GB = 10**9
# Multiplications of matrices, whose time is that of their FLOPs.
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_varlen_attn", "_varlen_attn_backward", "attend_dropout"}
_PRODUCTS |= {"attend_dropout_backward"}
_REACHED, _BANDWIDTH_REACHED, _LAUNCH_SECONDS = 0.65, 0.85, 10e-6  # assumptions, of no machine
_BANDWIDTHS = {  # bytes a second, from vendors' data sheets; names as in trainer/step/task.py
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
            # Fake tensors in place of those on a GPU; what is on the CPU for planning stays.
            faked = RankBatch(batch.spans.moved(mode.from_tensor), batch.num_documents, batch.num_rows, digest=1)
        train_step.begin({"": faked}, 2)
    flops = step_flops(train_step.encoder.model, batch.spans.lengths, len(batch.spans.labels))
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
    times: dict[str, Any] = {"host": round(sum(traffic.operations.values()) * _LAUNCH_SECONDS * 1e3, 1)}
    for name, bandwidth in _BANDWIDTHS.items():
        peak = peak_flops(name, half=True)
        assert peak is not None
        products, other_seconds = flops / (_REACHED * peak), rest / (_BANDWIDTH_REACHED * bandwidth)
        seconds = products + other_seconds
        times[name] = {"products": round(products * 1e3, 1), "others": round(other_seconds * 1e3, 1)}
        times[name] |= {"step": round(seconds * 1e3, 1), "mfu": round(flops / seconds / peak, 3)}
    return times


def _encoder(workload: Workload) -> Encoder:
    """The encoder whose attention is the kernel of a GPU."""
    encoder = workload.encoder()
    drops = drops_attention(encoder.model.config)
    dropping = (
        importlib.import_module("declutr.trainer.model.dropout_attention").attend_dropout if drops else None
    )  # Triton
    encoder._kernels[_CPU, drops] = Kernels(attend, dropping)
    return encoder


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
