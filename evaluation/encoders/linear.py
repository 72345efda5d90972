"""Linear layers by oneDNN with weights in its own layout, for encoding on a CPU.

torch multiplies float32 matrices by MKL, which takes twice as long as oneDNN on an AMD EPYC.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 2048  # the layout is made for batches of about this many tokens


def pack_linears(module: nn.Module) -> None:
    """Makes the linear layers of a module use oneDNN in inference mode, if torch has it; other uses stay as they are.

    The packed weights take as much memory again. The weights must not change afterwards.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            with torch.inference_mode():
                packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
            layer.forward = partial(_forward, layer, packed)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, packed: Tensor, inputs: Tensor) -> Tensor:
    """The layer's output; training and export go the ordinary way, because packed weights have no gradient."""
    if not torch.is_inference_mode_enabled() or inputs.dtype != torch.float32 or not inputs.numel():
        return F.linear(inputs, layer.weight, layer.bias)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, layer.bias, "none", [], "")
    return found
