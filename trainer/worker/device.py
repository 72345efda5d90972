"""The device of a process that trains: torch's settings, and moments on the device's timeline."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from declutr.common.config import AnyPrecision
from declutr.common.console.logs import get_logger
from declutr.common.storage import write_json
from declutr.trainer.build import autocast_type
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import DEVICE, kept_precision
from declutr.trainer.scaling import ScalingConfig

_CUBLAS, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""Variable of cuBLAS, and its values with which products repeat their bits."""


_PRECISIONS: tuple[AnyPrecision, ...] = ("auto", "fp32", "bf16")
_OTHERWISE = "precision=fp32 in a new run leaves them out"


def set_up_torch(scaling: ScalingConfig, precision: str, device: torch.device) -> None:
    """Sets threads, float32 products and algorithms, before the device is used."""
    if device.type == "cpu":
        torch.set_num_threads(scaling.cpus_per_worker)  # their number decides the order of sums
        return
    if autocast_type(precision, device) is not None:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if scaling.deterministic:
        repeat_bits()


def agree_precision(
    setting: AnyPrecision,  # of the run
    run: Path,  # folder of the run on this host
    device: torch.device,  # of this worker
    able: bool,  # it has units for bfloat16
    comm: Communicator,  # of all workers
) -> AnyPrecision:
    """The precision of all workers, for the setting `precision`.

    `auto` is bf16 where the devices of all workers have units for it, else fp32. The first worker records it, and the
    run keeps it: steps in the other precision would have other values.
    """
    kept = kept_precision(setting, run) if comm.rank == 0 else setting
    agreed = _PRECISIONS[comm.all_reduce_max(_PRECISIONS.index(kept))]
    if agreed == "auto":
        agreed = "fp32" if comm.all_reduce_max(int(not able)) else "bf16"
        if comm.rank == 0:
            write_json(run / DEVICE, {"device": device.type, "precision": agreed})
            if agreed == "bf16":
                get_logger().info("products in bfloat16, for which every worker's device has units; %s", _OTHERWISE)
    elif setting == "auto" and agreed == "bf16" and not able:
        get_logger().warning(
            "the run began with products in bfloat16 and keeps them; this device has no units for them, so steps are "
            "slow here, and their last bits may differ. %s",
            _OTHERWISE,
        )
    return agreed


@contextmanager
def torch_as_before() -> Iterator[None]:
    """Restores at its end what `set_up_torch` sets: what follows in this process computes as in a new one."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(exact, warn_only=warns)


def repeat_bits() -> None:
    """Lets equal steps of this process have equal bits on a GPU.

    Without it, sums in the gradients of flash attention and of word embeddings have the order in which a GPU gets to
    them.
    """
    value = os.environ.get(_CUBLAS)
    if value not in _WORKSPACES:  # a user's choice that repeats bits stays
        if value is not None:
            get_logger().warning("%s = %s does not repeat bits; %s is used", _CUBLAS, value, _WORKSPACES[0])
        os.environ[_CUBLAS] = _WORKSPACES[0]  # read at the first product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only finds mistakes


def refusal(error: RuntimeError) -> str | None:
    """A sentence about an operation that cannot repeat its bits; None: the error is another one."""
    message, remedy = str(error), "set scaling.deterministic=false (and elastic_determinism, if it is true)"
    if "does not have a deterministic implementation" in message:
        return f"{message.partition(',')[0]}; {remedy}, which continues the run without repeating bits"
    if "deterministic" in message and "uses CuBLAS" in message:
        set_it = f"set {_CUBLAS}={_WORKSPACES[0]} and start anew"
        return f"this process used its GPU before without the variable of cuBLAS: {set_it}, or {remedy}"
    return None


class DeviceEvent:
    """The present end of the device's queue of work. A processor works as it goes, a GPU behind its process."""

    def __init__(self, device: torch.device) -> None:
        self._at = time.monotonic()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has reached this place."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between two places that the device has reached, by its own clock."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1000
