"""Choice of the attention kernels of a GPU: by its compute capability, the size of a head, and a trial."""

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from declutr.common.console.logs import get_logger
from declutr.trainer.model.dropout import WeightDropout


class Kernels(NamedTuple):
    """Kernels of a GPU, each of which computes the attention of all spans in one call.

    Attributes:
        attend: trainer/model/kernels.py.
        attend_dropout: trainer/model/dropout_attention.py, which drops weights; None: groups do.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None], Tensor]
    attend_dropout: (
        Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None, int | None, WeightDropout], Tensor] | None
    ) = None


def fitting_kernels(model: torch.nn.Module, device: torch.device, drops: bool) -> Kernels | None:
    """The kernels for an encoder's attention on a device; a line in the log says which a GPU cannot use.

    Args:
        model: the encoder.
        device: its device.
        drops: attention weights are dropped.
    """
    if device.type != "cuda":
        return None
    from declutr.trainer.model import kernels

    config: Any = model.config
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    capability = torch.cuda.get_device_capability(device)
    if problem := kernels.problem(capability, head_size):
        _tell(f"attention computes spans of similar length together, which is slower: {problem}")
        return None
    kernels.use_newest(capability, head_size, device)
    return Kernels(kernels.attend, fitting_dropout(head_size, device) if drops else None)


def fitting_dropout(head_size: int, device: torch.device) -> Any:
    """The kernel that drops attention weights; None, with a line in the log, if it does not work on the device."""
    problem = "the package triton is missing; install torch for CUDA"
    if find_spec("triton") is not None:
        from declutr.trainer.model import dropout_attention

        failure = dropout_attention.problem(head_size, device)
        if failure is None:
            return dropout_attention.attend_dropout
        problem = failure
    _tell(f"attention dropout stores the weights of some spans at a time, which is slower: {problem}")
    return None


@lru_cache
def _tell(message: str) -> None:
    """Logs a message once in a process, which may have several encoders."""
    get_logger().warning("%s", message)
