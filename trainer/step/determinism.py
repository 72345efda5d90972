"""Algorithms of a GPU that repeat their bits."""

import os

import torch

REFUSAL = "does not have a deterministic implementation"
"""A part of torch's message about an operation that has no such algorithm."""


def repeat_bits() -> None:
    """Lets equal steps of this process have equal bits on a GPU, before it uses one.

    Without it, sums in the gradients of flash attention and of word embeddings have the order in which a GPU gets to
    them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only finds mistakes
