"""Floating-point operations of a step and peak rates of devices, for model FLOPs utilisation.

The forward of a token costs 2 FLOPs for every weight of the encoder's linear layers, plus 4 * layers * H * span length
for attention (scores and weighted sum, without reduction for a sliding window). The MLM head costs
2 * (H^2 + H * vocabulary) for each selected token. A backward costs twice its forward. Not counted as work of the model
are embedding look-ups, norms, activations, the loss, and the second forward of gradient caching or activation
checkpointing.
"""

import re
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORWARD_AND_BACKWARD = 3
# Peaks of dense matrix products in FLOP/s, half precision and float32, without sparsity, from vendors' data sheets. A
# GPU has the peak with the most words of its name: "NVIDIA H100 PCIe" is slower than "NVIDIA H100 80GB HBM3".
_PEAKS = {
    "GB200": (2500e12, 90e12),
    "B200": (2250e12, 80e12),
    "H200": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "A10": (125e12, 31.2e12),
    "A10G": (70e12, 35e12),
    "L4": (121e12, 30.3e12),
}


def linear_weights(model: "PreTrainedModel") -> int:
    """Number of weights of the encoder's linear layers, without the MLM head, which `step_flops` adds."""
    layers = (module for module in model.base_model.modules() if isinstance(module, nn.Linear))
    return sum(layer.weight.numel() for layer in layers)


def step_flops(model: "PreTrainedModel", weights: int, lengths: Tensor, num_selected: int) -> float:
    """FLOPs of forward and backward over spans.

    Args:
        model: the masked language model; only its shape is used.
        weights: result of `linear_weights`.
        lengths: `(S,)` number of tokens of each span, on the CPU.
        num_selected: number of tokens that the MLM head predicts.
    """
    config = model.config
    hidden = int(config.hidden_size)
    sizes = lengths.numpy().astype(np.float64)
    tokens, pairs = float(sizes.sum()), float(np.square(sizes).sum())
    body = 2 * weights * tokens + 4 * int(config.num_hidden_layers) * hidden * pairs
    head = 2 * (hidden * hidden + hidden * int(config.vocab_size)) * num_selected
    return _FORWARD_AND_BACKWARD * (body + head)


def peak_flops(gpu: str | None, half: bool) -> float | None:
    """Peak of a GPU in FLOP/s by its name; None for other GPUs and for CPUs, which have no name."""
    words = set(re.split(r"[\s-]+", gpu or ""))
    names = sorted((name for name in _PEAKS if words.issuperset(name.split())), key=lambda name: name.count(" "))
    return _PEAKS[names[-1]][0 if half else 1] if names else None


def gpu_name(device: torch.device) -> str | None:
    """Name of the GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
