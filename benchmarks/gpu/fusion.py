"""Kernels of the compiled parts of a step, planned as Inductor plans them for a GPU, counted and never generated.

Neither a GPU nor Triton is needed, because no code is generated. torch does not compile while operations are counted,
so the parts are planned alone (`Plan`), and the counted step takes their numbers (`planned`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
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

from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.model.compilation import parts
from declutr.trainer.model.encoder import Encoder

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
        made = cls()
        counters.clear()
        torch._dynamo.reset()
        found = list(parts(encoder.model.base_model))
        backends = {kind: _Backend(made, kind) for kind in (HEAD, *map(kind_of, found))}  # layers of a kind share it
        for part in found:
            part.compile(backend=backends[kind_of(part)], dynamic=True)
        loss = torch.compile(encoder._compilation.loss, backend=backends[HEAD], dynamic=True)
        for batch in batches:
            with patch.object(encoder._compilation, "loss", loss):
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    embeddings, mlm_sum = encoder(batch)
                (embeddings.sum() + mlm_sum).backward()
        made.graphs = counters["stats"]["unique_graphs"]
        made.breaks = sum(counters["graph_break"].values())
        return made


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
        environment = next((each.node.shape_env for each in inputs if isinstance(each, torch.SymInt)), ShapeEnv())
        backward = bool(options.get("is_backward", False))
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=environment, is_backward=backward)
        config = torch._inductor.config.patch(cpu_backend="triton")
        sums = patch("torch._inductor.scheduler._is_gpu_triton_backend", lambda *_: True)  # over rows and over columns
        debug, fake = V.set_debug_handler(DebugContext()), V.set_fake_mode(detect_fake_mode(inputs))
        with config, sums, debug, fake, V.set_graph_handler(lowered):
            lowered.run(*inputs)
            lowered._update_scheduler()
            nodes = [node for node in lowered.scheduler.nodes if node.get_read_write_buffers_sizes()]
            found = Counter[str]()
            for node in nodes:
                kind = "products" if isinstance(node, ExternKernelSchedulerNode) else "compiled"
                found[kind] += node.get_read_write_buffers_sizes()
                found[f"{kind} operations"] += 1
        (self.plan.backward if backward else self.plan.forward).setdefault(self.kind, found)
        return make_boxed_func(_shapes_of(graph))


def _shapes_of(graph: GraphModule) -> Callable[..., Any]:
    """A function that returns zeros with the shapes of a graph's outputs."""

    def call(*values: Any) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            faked = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in values]
            made = graph.forward(*faked)
        return [
            torch.zeros(each.shape, dtype=each.dtype).as_strided(each.shape, each.stride())
            if isinstance(each, Tensor)
            else each
            for each in made
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
        inner = {id(each) for each in model.base_model.parameters()}
        embedding = model.get_input_embeddings().weight
        head = [each for each in model.parameters() if id(each) not in inner or each is embedding]  # which is tied
        stack.enter_context(patch.object(compilation, "loss", _counted(plan, HEAD, compilation.loss, head, traffic)))
        yield


def _counted(
    plan: Plan, kind: str, forward: Callable[..., Tensor], parameters: list[nn.Parameter], traffic: Any
) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad(), traffic.pausing():
            made = forward(*args, **kwargs)
        inputs = [each for each in (*args, *kwargs.values(), *parameters) if isinstance(each, Tensor)]
        result: Tensor = _Planned.apply(plan, kind, traffic, made, *inputs)  # type: ignore[no-untyped-call]
        return result

    return call


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, kind: str, traffic: Any, made: Tensor, *inputs: Tensor) -> Tensor:
        ctx.parts = plan, kind, traffic
        ctx.save_for_backward(*inputs)
        traffic.add(plan.forward[kind])
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        plan, kind, traffic = ctx.parts
        traffic.add(plan.backward[kind])
        wanted = zip(ctx.needs_input_grad[4:], ctx.saved_tensors, strict=True)
        return None, None, None, None, *(torch.empty_like(each) if needed else None for needed, each in wanted)
