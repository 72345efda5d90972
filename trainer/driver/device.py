"""The device of a run, CPUs or GPUs: chosen once, recorded in the run's folder, and kept.

A spot market takes GPUs and returns them. If every start chose again, a run would move to CPUs meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.errors import DamagedError
from declutr.common.storage import read_record, write_json
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.checkpoints.store import RunStore
from declutr.trainer.setup.scaling import ScalingConfig

DEVICE = "device.json"

Device = Literal["cpu", "cuda"]


class _Record(msgspec.Struct, frozen=True):
    """Content of `device.json`."""

    device: Device


def recorded_device(run: Path) -> Device | None:
    """The device that a run has chosen; None before its first start.

    Raises:
        DamagedError: `device.json` holds something else.
    """
    path = run / DEVICE
    try:
        return read_record(path, _Record).device
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise DamagedError(f'{error}; write {{"device": "cuda"}} or {{"device": "cpu"}} into it') from error


def kept_device(scaling: ScalingConfig, run: Path) -> Literal["auto", "cpu", "cuda"]:
    """The device of a run's next start: the recorded one, else `scaling.device`.

    A run without a checkpoint has computed nothing yet, so that `scaling.device` may still replace the record.

    Raises:
        DamagedError: as `recorded_device`.
    """
    before = recorded_device(run)
    if before is None or (scaling.device != "auto" and not steps_in(run / CHECKPOINTS)):
        return scaling.device
    return before


def device_problem(scaling: ScalingConfig, run: Path) -> str | None:
    """A problem if `scaling.device` differs from the device of the run's checkpoints, or its record is damaged."""
    try:
        before = kept_device(scaling, run)
    except DamagedError as error:
        return f"run = {run}: {error}"
    if scaling.device in ("auto", before):
        return None
    return (
        f"scaling.device = {scaling.device}: this run was started on {before} ({run / DEVICE}), and a run keeps its "
        f"device; set it to {before} or auto, or start a new run with its weights: run=NEW "
        f"encoder.pretrained={run}/export"
    )


def choose_device(scaling: ScalingConfig, run: Path, store: RunStore | None, resources: Mapping[str, float]) -> Device:
    """Chooses the device at a run's first start, and records and logs it; returns the recorded one later.

    Args:
        scaling: settings of the run.
        run: folder of the run.
        store: of the run, which gets the choice before any step, so that no other host chooses again; None: a folder.
        resources: of Ray's session, by name.

    Raises:
        DamagedError: as `recorded_device`.
        RemoteError: the store does not take the choice.
    """
    device = kept_device(scaling, run)
    gpus, min_workers = resources.get("GPU", 0), scaling.least_workers
    if device == "auto":
        device = "cuda" if gpus >= min_workers else "cpu"
        reason = f"scaling.device = auto, and Ray has {gpus:g} GPU(s) for at least {min_workers} worker(s)"
    else:
        reason = f"scaling.device = {scaling.device}"
    if recorded_device(run) != device:
        write_json(run / DEVICE, {"device": device})
        if store is not None:
            store.send(DEVICE)
        get_logger().info("training on %s (%s); the run keeps this device (%s)", device, reason, DEVICE)
    return device
