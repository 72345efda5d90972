"""torch's settings in a process that trains."""

import os

import torch

from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import autocast_type

REFUSAL = "does not have a deterministic implementation"
"""A part of torch's message about an operation that cannot repeat its bits."""


def set_up_torch(config: TrainConfig, device: torch.device) -> None:
    """Sets threads, float32 products and algorithms, before the device is used."""
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
        return
    if autocast_type(config.precision, device) is not None:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if config.scaling.deterministic:
        repeat_bits()


def repeat_bits() -> None:
    """Lets equal steps of this process have equal bits on a GPU.

    Without it, sums in the gradients of flash attention and of word embeddings have the order in which a GPU gets to
    them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only finds mistakes
