"""Compiling the layers of an encoder with torch.compile: if they are compiled, and for which forwards."""

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from declutr.common.console.logs import get_logger

_COMPILERS = ("gcc", "clang")
"""Names under which Triton looks for a compiler of its launchers; `cc` is not among them."""


class Compilation:
    """Compiles an encoder's layers once for all lengths, for training alone.

    A validation has too few forwards to be worth another graph.

    Args:
        layers: the encoder without its head; changed in place.
        setting: `encoder.compile`; None: compile on a GPU, if kernels can be generated for it.
    """

    def __init__(self, layers: nn.Module, setting: bool | None) -> None:
        self._layers = layers
        self._undecided = setting is None
        self._compiled = bool(setting)
        if setting:
            layers.compile(dynamic=True)

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
                self._layers.compile(dynamic=True)
        if training or not self._compiled:
            return nullcontext()
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance


def compiler_problem() -> str | None:
    """The reason why torch.compile cannot generate kernels for a GPU, or None."""
    if find_spec("triton") is None:
        return "the package triton is missing; install torch for CUDA"
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        return f"no C compiler was found ({named or ', '.join(_COMPILERS)}); install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"{header} is missing; install python3-dev, or Python's headers in another way"
    return None
