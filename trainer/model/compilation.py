"""Compiling the layers of an encoder with torch.compile: which parts, and for which forwards."""

import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from declutr.common.console.logs import get_logger
from declutr.trainer.torch_private import raise_recompile_limit

_COMPILERS = ("gcc", "clang")
"""Names under which Triton looks for a compiler of its launchers; `cc` is not among them."""

_GRAPHS = 32
"""Most graphs that torch makes before the rest runs without: kinds of layers, with and without gradients, share it."""


class Compilation:
    """Compiles an encoder's layers and the loss of its head once for all lengths, for training alone.

    A validation has too few forwards to be worth another graph.

    Args:
        layers: the encoder without its head; changed in place.
        loss: computes the loss of the head.
        setting: `encoder.compile`; None: compile on a GPU, if kernels can be generated for it.

    Attributes:
        loss: the same as the argument, compiled or not.
    """

    def __init__(self, layers: nn.Module, loss: Callable[..., Tensor], setting: bool | None) -> None:
        self._layers = layers
        self.loss = loss
        self._undecided = setting is None
        self._compiled = bool(setting)
        if setting:
            self._compile()

    def forward_in(self, device: torch.device, training: bool, sharded: bool) -> AbstractContextManager[None]:
        """The context of a forward.

        Args:
            device: device of the batch.
            training: true in training mode.
            sharded: true if every layer gathers its parameters; such layers are compiled only by the setting.
        """
        if self._undecided and device.type == "cuda" and not sharded:
            self._undecided = False
            if problem := compiler_problem():
                get_logger().warning("the encoder is not compiled, so steps are slower: %s", problem)
            else:
                self._compiled = True
                self._compile()
        if training or not self._compiled:
            return nullcontext()
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance

    def _compile(self) -> None:
        compile_layers(self._layers)
        self.loss = torch.compile(self.loss, dynamic=True)


def compile_layers(body: nn.Module, **options: Any) -> None:
    """Compiles an encoder's layers one by one, and what is before and after them, each for any lengths.

    Layers of one kind share a graph. The backward of a graph completes all gradients of its parameters at its end, so
    that those of a whole encoder could not be sent while it runs (trainer/parallel/overlap.py).

    Args:
        body: the encoder without its head; changed in place.
        options: of torch.compile.
    """
    # which Dynamo causes itself, as it looks at the hidden states that a layer gets
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    raise_recompile_limit(_GRAPHS)
    for part in parts(body):
        part.compile(dynamic=True, **options)


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a module and the largest parts without layers.

    Modules without parameters and single ones of torch, such as a norm, are left out: they are one kernel already.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if layers and module not in layers:
        for child in module.children():
            yield from parts(child)
    elif next(module.parameters(), None) is not None and not type(module).__module__.startswith("torch.nn."):
        yield module


def compiler_problem() -> str | None:
    """The reason why torch.compile cannot generate kernels for a GPU, or None."""
    if find_spec("triton") is None:
        return "the package triton is missing; install torch for CUDA"
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else _COMPILERS)):
        return f"no C compiler was found ({compiler or ', '.join(_COMPILERS)}); install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"{header} is missing; install python3-dev, or Python's headers in another way"
    return None
