"""Multiplications and additions that a step needs, whatever it computes: the numerator of model FLOPs utilisation.

A matrix product of (m, k) with (k, n) counts 2 m k n; a backward pass counts twice its forward pass; recomputation,
embedding look-ups, normalisation and activations count nothing. For L layers of width H with feed-forward width F,
vocabulary V, T tokens in spans of length t, and K selected tokens:

    forward = T L (8 H^2 + 4 H F) + 4 L H sum(t^2) + K (2 H^2 + 2 H V)
    step = 3 forward
"""

from typing import Any

from torch import Tensor

# Dense peak in FLOP/s of bfloat16 products, from the makers' data sheets; without the factor two of sparsity.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "L4": 121e12}


def step_flops(config: Any, lengths: Tensor, num_selected: int) -> float:
    """FLOPs of one step's forward and backward pass.

    Args:
        config: transformers config of a RoBERTa- or BERT-like encoder.
        lengths: `(S,)` tokens of each span.
        num_selected: K.
    """
    width, inner = int(config.hidden_size), int(config.intermediate_size)
    layers, vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
    sizes = lengths.double()
    linear = float(sizes.sum()) * layers * (8.0 * width**2 + 4.0 * width * inner)
    attention = 4.0 * layers * width * float((sizes**2).sum())
    head = num_selected * (2.0 * width**2 + 2.0 * width * vocabulary)
    return 3.0 * (linear + attention + head)


def peak_flops(gpu: str | None) -> float | None:
    """The device's dense bfloat16 peak, or None where it is not known here."""
    known = sorted((name for name in PEAKS if gpu is not None and name in gpu), key=len)
    return PEAKS[known[-1]] if known else None
