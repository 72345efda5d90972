"""How many multiplications a step needs, and how fast a device could do them: model FLOPs utilisation.

Forward of a token: 2 for every weight of the encoder's linear layers, plus 4 * layers * H * span length for attention
(scores and weighted sum; a sliding window is not taken off). The MLM head costs 2 * (H^2 + H * vocabulary) a selected
token. A backward costs twice its forward. Embedding look-ups, norms, activations, the loss, and the second forward of
gradient caching or activation checkpointing are not counted: they are overhead, not the model's work.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORWARD_AND_BACKWARD = 3
# Dense matrix products in FLOP/s, half precision and float32, from the makers' data sheets, without sparsity.
_PEAKS = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "A10": (125e12, 31.2e12),
    "A10G": (70e12, 35e12),
    "L4": (121e12, 30.3e12),
}


def linear_weights(model: "PreTrainedModel") -> int:
    """Weights of the encoder's linear layers; the MLM head is counted by the token, see `step_flops`."""
    layers = (module for module in model.base_model.modules() if isinstance(module, nn.Linear))
    return sum(layer.weight.numel() for layer in layers)


def step_flops(model: "PreTrainedModel", weights: int, lengths: Tensor, num_selected: int) -> float:
    """FLOPs of forward and backward over spans.

    Args:
        model: the masked language model, whose shape counts.
        weights: `linear_weights` of it.
        lengths: `(S,)` tokens of the spans, on the CPU.
        num_selected: tokens that the MLM head predicts.
    """
    config = model.config
    hidden = int(config.hidden_size)
    tokens, pairs = float(lengths.sum()), float(lengths.double().square().sum())
    body = 2 * weights * tokens + 4 * int(config.num_hidden_layers) * hidden * pairs
    head = 2 * (hidden * hidden + hidden * int(config.vocab_size)) * num_selected
    return _FORWARD_AND_BACKWARD * (body + head)


def peak_flops(gpu: str | None, half: bool) -> float | None:
    """The peak in FLOP/s of a GPU by its name; None where it is not known: other GPUs, and CPUs, which have no name."""
    known = sorted((name for name in _PEAKS if gpu is not None and name in gpu), key=len)
    return _PEAKS[known[-1]][0 if half else 1] if known else None


def gpu_name(device: torch.device) -> str | None:
    """What the GPU calls itself; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
