"""How many multiplications a step needs, and how fast a device could do them: model FLOPs utilisation.

Forward of a token: 2 for every weight of the encoder's linear layers, plus 4 * layers * H * span length for attention
(scores and weighted sum; a sliding window is not taken off). The MLM head costs 2 * (H^2 + H * vocabulary) a selected
token. A backward costs twice its forward. Embedding look-ups, norms, activations, the loss, and the second forward of
gradient caching or activation checkpointing are not counted: they are overhead, not the model's work.
"""

import torch
from torch import Tensor, nn

from trainer.model import Encoder

_FORWARD_AND_BACKWARD = 3
# Dense matrix products, from the makers' data sheets, in FLOP/s; half precision unless float32 is said.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "L4": 121e12}
_PEAKS_FLOAT32 = {"H200": 67e12, "H100": 67e12, "A100": 19.5e12, "L40S": 91.6e12, "A10G": 35e12, "L4": 30.3e12}


def linear_weights(encoder: Encoder) -> int:
    """Weights of the encoder's linear layers; the MLM head is counted by the token, see `step_flops`."""
    layers = (module for module in encoder.model.base_model.modules() if isinstance(module, nn.Linear))
    return sum(layer.weight.numel() for layer in layers)


def step_flops(encoder: Encoder, weights: int, lengths: Tensor, num_selected: int) -> float:
    """FLOPs of forward and backward over spans.

    Args:
        encoder: whose shape counts.
        weights: `linear_weights` of it.
        lengths: `(S,)` tokens of the spans, on the CPU.
        num_selected: tokens that the MLM head predicts.
    """
    hidden, config = encoder.hidden_size, encoder.model.config
    tokens, pairs = float(lengths.sum()), float(lengths.double().square().sum())
    body = 2 * weights * tokens + 4 * int(config.num_hidden_layers) * hidden * pairs
    head = 2 * (hidden * hidden + hidden * int(config.vocab_size)) * num_selected
    return _FORWARD_AND_BACKWARD * (body + head)


def peak_flops(device: torch.device, half: bool) -> float | None:
    """The device's peak in FLOP/s; None where it is not known (CPUs, other GPUs)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    table = _PEAKS if half else _PEAKS_FLOAT32
    return next((peak for kind, peak in table.items() if kind in name), None)
