"""Kernels of a compiled encoder, planned as Inductor plans them for a GPU, counted and never generated.

Kernels are planned for Triton. No GPU and no Triton are needed, because no code is generated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.traffic import Traffic
from trainer.data.batches import SpanBatch
from trainer.model.encoder import Encoder


@dataclass
class Plan:
    """Kernels of a compiled encoder, as a backend of torch.compile that computes nothing.

    Attributes:
        graphs: graphs that Dynamo made.
        breaks: places where a graph had to end.
        forward: operations and bytes of a forward.
        backward: operations and bytes of a backward.
        output: type of the hidden states.
    """

    graphs: int = 0
    breaks: int = 0
    forward: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)
    output: torch.dtype = torch.float32

    @classmethod
    def of(cls, encoder: Encoder, batches: list[SpanBatch], autocast: torch.dtype | None) -> "Plan":
        """Plan the kernels for the first batch; the others show whether another graph is made for them."""
        made = cls()
        counters.clear()
        torch._dynamo.reset()
        encoder.model.base_model.compile(backend=made._plan_graph, dynamic=True)
        for batch in batches:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                hidden = encoder.hidden(batch)
            made.output = hidden.dtype
            hidden.sum().backward()
        # Dynamo repeats an analysis that Inductor asks it to repeat: what it kept counts
        made.graphs = counters["stats"]["unique_graphs"]
        made.breaks = sum(counters["graph_break"].values())
        return made

    def with_layers(self, other: "Plan", more: int) -> "Plan":
        """The plan of an encoder with `more` layers than that of `other`, which has one more than that of this plan.

        All layers have the same kernels.
        """

        def grown(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
            operations, moved = (b + more * (b - a) for a, b in zip(one, two, strict=True))
            return operations, moved

        forward, backward = grown(self.forward, other.forward), grown(self.backward, other.backward)
        return replace(other, forward=forward, backward=backward)

    def _plan_graph(self, graph: GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=self._plan_kernels)

    def _plan_kernels(self, graph: GraphModule, inputs: list[Any], **options: Any) -> Any:
        record_original_output_strides(graph)
        view_to_reshape(graph)
        _recursive_post_grad_passes(graph, is_inference=False)
        environment = next((each.node.shape_env for each in inputs if isinstance(each, torch.SymInt)), ShapeEnv())
        backward = bool(options.get("is_backward", False))
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=environment, is_backward=backward)
        config = torch._inductor.config.patch(cpu_backend="triton")
        debug, fake = V.set_debug_handler(DebugContext()), V.set_fake_mode(detect_fake_mode(inputs))
        with config, debug, fake, V.set_graph_handler(lowered):
            lowered.run(*inputs)
            lowered._update_scheduler()
            nodes = [node for node in lowered.scheduler.nodes if node.get_read_write_buffers_sizes()]
            found = len(nodes), sum(node.get_read_write_buffers_sizes() for node in nodes)
        if backward:
            self.backward = max(self.backward, found)
        else:
            self.forward = max(self.forward, found)
        return make_boxed_func(_shapes_of(graph))


def _shapes_of(graph: GraphModule) -> Any:
    """A function that returns empty tensors with the shapes of a graph's outputs."""

    def call(*values: Any) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            faked = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in values]
            made = graph.forward(*faked)
        return [
            torch.empty(each.shape, dtype=each.dtype).as_strided(each.shape, each.stride())
            if isinstance(each, Tensor)
            else each
            for each in made
        ]

    return call


@contextmanager
def planned(encoder: Encoder, plan: Plan, traffic: Traffic) -> Iterator[None]:
    """Replaces the encoder's forward and backward by the counts of their plan."""
    body = encoder.model.base_model
    parameters = [each for each in body.parameters() if each.requires_grad]

    def forward(input_ids: Tensor, **_: Any) -> Any:
        states = _Planned.apply(plan, traffic, (*input_ids.shape, encoder.hidden_size), *parameters)  # type: ignore[no-untyped-call]
        return _Output(states)

    with patch.object(body, "forward", forward):
        yield


@dataclass(frozen=True)
class _Output:
    last_hidden_state: Tensor


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, traffic: Traffic, shape: tuple[int, ...], *parameters: nn.Parameter) -> Tensor:
        ctx.parts = plan, traffic, parameters
        traffic.add("compiled", *plan.forward)
        return torch.empty(shape, dtype=plan.output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        plan, traffic, parameters = ctx.parts
        traffic.add("compiled", *plan.backward)
        return None, None, None, *map(torch.empty_like, parameters)
