"""What a run's folder says of its continuation: settings, shards and device must be those with which it began.

The device, CPUs or GPUs, is chosen once, recorded and kept: a spot market takes GPUs and returns them, and a run whose
every start chose again would move to CPUs meanwhile.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from declutr.common.cluster import cluster_problem, in_session, named_cluster
from declutr.common.config import flat_keys
from declutr.common.console.logs import get_logger
from declutr.common.errors import DamagedError, UsageError
from declutr.common.storage import Record, hash_json, read_record, write_json
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_among, steps_in
from declutr.trainer.checkpoints.state import joint_hash
from declutr.trainer.checkpoints.store import RunStore
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.objectives.config import NN_ACCURACY
from declutr.trainer.run import DEVICE, RESUME_SETTINGS, Device, RunPlan, recorded_device
from declutr.trainer.scaling import ON_GPUS, ScalingConfig

_WORKERS_A_CPU = 4  # more share a CPU in tests alone, and hundreds end a machine


def kept_device(scaling: ScalingConfig, run: Path) -> Literal["auto", "cpu", "cuda"]:
    """The device of a run's next start: the recorded one, else `scaling.device`.

    A run without a checkpoint has computed nothing yet, so that `scaling.device` may still replace the record.
    """
    record = recorded_device(run)
    if record is None or (scaling.device != "auto" and not steps_in(run / CHECKPOINTS)):
        return scaling.device
    return record.device


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
        f"encoder.from_config=null encoder.pretrained={run}/export"
    )


def choose_device(
    scaling: ScalingConfig,  # settings of the run
    run: Path,  # folder of the run
    # of the run, which gets the choice before any step, so that no other host chooses again; None: a folder.
    store: RunStore | None,
    resources: Mapping[str, float],  # of Ray's session, by name
) -> Device:
    """Chooses the device at a run's first start, and records and logs it; returns the recorded one later."""
    device = kept_device(scaling, run)
    gpus, min_workers = resources.get("GPU", 0), scaling.least_workers
    if device == "auto":
        device = "cuda" if gpus >= min_workers else "cpu"
        reason = f"scaling.device = auto, and Ray has {gpus:g} GPU(s) for at least {min_workers} worker(s)"
    else:
        reason = f"scaling.device = {scaling.device}"
    if device == "cuda" and scaling.elastic_determinism:
        raise UsageError(f"scaling.elastic_determinism = true, and this run would train on GPUs: {ON_GPUS}")
    record = recorded_device(run)
    if record is None or record.device != device:
        write_json(run / DEVICE, {"device": device})
        if store is not None:
            store.send(DEVICE)
        get_logger().info("training on %s (%s); the run keeps this device (%s)", device, reason, DEVICE)
    return device


def ray_problems(scaling: ScalingConfig, run: Path, own_session: bool) -> list[str]:
    """Problems with Ray for this run: a cluster that does not answer, too few GPUs on this machine.

    A finished run needs no Ray, nor does one in this process. Without `own_session`, another session of this process
    may use any cluster.
    """
    if (run / SUMMARY).is_file():
        return []
    if scaling.local:
        return _gpu_problems(scaling, run)
    if in_session() and not own_session:
        return []
    name, address = named_cluster(scaling.address, "scaling.address")
    if address:  # whose GPUs may join later
        return [*filter(None, [cluster_problem(name, address)])]
    return _gpu_problems(scaling, run)


def crowd_problems(scaling: ScalingConfig, run: Path) -> list[str]:
    """More workers than this machine can start, for a run that is not finished and names no cluster."""
    limit = _WORKERS_A_CPU * (os.cpu_count() or 1)
    if scaling.most_workers <= limit or named_cluster(scaling.address)[1] or (run / SUMMARY).is_file():
        return []
    why = f"{scaling.most_workers} workers are more than this machine with {os.cpu_count()} CPUs can start ({limit})"
    return [f"scaling.num_workers: {why}; lower it, or name a cluster (scaling.address)"]


def _gpu_problems(scaling: ScalingConfig, run: Path) -> list[str]:
    """Too few GPUs on this machine for a run that needs them."""
    try:
        device = kept_device(scaling, run)
    except DamagedError:  # `problems` reports it
        return []
    if device != "cuda":
        return []
    import torch

    gpus, min_workers = torch.cuda.device_count(), scaling.least_workers
    if gpus >= min_workers:
        return []
    kept = "" if scaling.device == "cuda" else f"this run was started on GPUs ({run / DEVICE}), "
    trained = steps_in(run / CHECKPOINTS)
    cpus = "set it to cpu, in a new run if this one is to stay" if trained else "set it to cpu"
    alternatives = "" if scaling.local else ", lower scaling.num_workers, or name a cluster (scaling.address)"
    return [
        f"scaling.device = {scaling.device}: {kept}{min_workers} workers need a GPU each, and this machine has {gpus} "
        f"that torch can use; {cpus}{alternatives}"
    ]


# Settings and shards.


def run_problems(plan: RunPlan) -> list[str]:
    """Problems of a folder with a run of another configuration, which may change while there is no checkpoint."""
    config, run = plan.config, plan.folder
    remote = is_remote(config.run)  # the copy here may lack its checkpoints
    began = steps_among((Folder(config.run) / CHECKPOINTS).names()) if remote else steps_in(run / CHECKPOINTS)
    # the settings have the hashes of what `validation` names, which is reported alone
    if not began or any(key.startswith("validation.") for key in plan.unreadable):
        return []
    before = read_resume_settings(run)
    changed = [] if before is None else changes(before, config.resume_settings())
    if not changed:
        return other_checkpoints(plan)
    return [
        f"run = {config.run}: holds a run of another configuration ({'; '.join(changed)}); name another folder; "
        f"encoder.from_config=null encoder.pretrained={'COPY' if remote else config.run}/export starts a new run with "
        "this run's weights, once it is exported" + (f" (`declutr copy {config.run}/export COPY/export`)" * remote)
    ]


def read_resume_settings(run: Path) -> dict[str, Any] | None:
    """Reads the settings that decide a run's result; None if the file is missing, or damaged, which is logged."""
    path = run / RESUME_SETTINGS
    if not path.is_file():
        return None
    try:
        settings = read_record(path, dict[str, Any])
        if not isinstance(settings.get("encoder"), dict):
            raise DamagedError(f"{path} is damaged: it holds no configuration")
    except DamagedError as error:
        get_logger().warning("%s; reading the run's checkpoints instead", error)
        return None
    return settings


def other_checkpoints(plan: RunPlan) -> list[str]:
    """A problem if a checkpoint has another configuration; no worker would take it, and the run would begin again."""
    folder, expected = plan.folder / CHECKPOINTS, plan.config.hash()
    for step, state in checkpoint.states_in(folder):
        if state.config_hash != expected:
            path = checkpoint.checkpoint_path(folder, step)
            return [
                f"run = {plan.config.run}: {path.name} is of another configuration, and {RESUME_SETTINGS}, which "
                "lists the settings, is missing, damaged or of another version; name another folder"
            ]
    return []


def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Differences between two sets of resume settings, one line a key: all that changes their hash."""
    old, new = flat_keys(before), flat_keys(now)

    def describe(tree: dict[str, object], key: str) -> str:
        return repr(tree[key]) if key in tree else "not set"

    return [
        f"{key} was {describe(old, key)}, now {describe(new, key)}"
        for key in sorted(set(old) | set(new))
        # `==` takes 0 for 0.0, whose hashes differ: each worker would skip every checkpoint and begin at step 0
        if key not in old or key not in new or hash_json(old[key]) != hash_json(new[key])
    ]


def other_shards(plan: RunPlan) -> list[str]:
    """Problems of a run that was trained on shards of other hashes; its next steps would read the wrong documents."""
    now = plan.hashes
    places = {
        name: " or ".join(f"{key} = {place}" for key, place in task.keyed_places.items())
        for name, task in plan.tasks.items()
    }
    for _, state in checkpoint.states_in(plan.folder / CHECKPOINTS):
        if state.data_hash != joint_hash(now):
            before = state.task_hashes
            changed = [places[name] for name in now if name in before and before[name] != now[name]] or places.values()
            order = " and their order" if len(plan.config.places) > 1 else ""
            return [
                f"run = {plan.config.run}: was trained on other shards than {' or '.join(changed)} holds now; "
                f"name another folder for the run, or restore the shards{order}"
            ]
    return []


# Files that the driver writes at the end of a run or command.


SUMMARY = "summary.json"
SECONDS = "seconds.json"
FAILURES = "failures.log"
RUN_FILES = ("config.yaml", RESUME_SETTINGS, SECONDS, FAILURES, SUMMARY)
"""Written by the driver of a run. DEVICE is not: the first worker completes it, maybe on another host, and sends it."""
MOMENT = "%Y-%m-%d %H:%M:%S"  # form of the local time at which a failure is recorded


def ended_early(run: Path, patience: int | None, done: int) -> dict[str, Any] | None:
    """Reason and patience of a run's early end; None if it did not end early or has more `patience` now.

    `done` is the step of the newest checkpoint; an end at another step does not count.
    """
    before = _read(run / SUMMARY, _Ended)
    if before is None or before.ended != "early" or before.steps != done:
        return None
    if patience is None or patience > before.patience:
        return None
    return {"why": before.why, "patience": before.patience}


class _Ended(msgspec.Struct, frozen=True):
    """The part of a summary that is read back."""

    ended: str
    steps: int
    why: str = ""
    patience: int = 0


def _read(path: Path, kind: type[Record]) -> Record | None:
    """The content of an optional file; None if it is missing, or damaged, which is logged."""
    try:
        return read_record(path, kind)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        get_logger().warning("%s; continuing without it", error)
        return None


def first_and_last_scores(run: Path) -> dict[str, dict[str, float]]:
    """The first and the last held-out scores of a run, by their keys in the summary; empty without validation."""
    lines = [line for line in read_metrics(run) if line["kind"] == "validation"] or [{}]
    first, last = (
        {name: value for name, value in line.items() if name not in ("kind", "step", "time")}
        for line in (lines[0], lines[-1])
    )
    return {"first_scores": first, "last_scores": last}


def neighbours_of(summary: Mapping[str, Any]) -> list[str]:
    """The accuracy of nearest neighbours of each task with images or sounds, before and after, in words."""
    first, last = summary["first_scores"], summary["last_scores"]
    names = [name for name in last if name.endswith(f"_{NN_ACCURACY}") and None not in (first.get(name), last[name])]
    return [f"{name} {first[name]:.4f} at the start, {last[name]:.4f} at the end" for name in names]


def read_seconds(run: Path) -> float:
    """Training time of all commands of a run, in seconds."""
    return _read(run / SECONDS, float) or 0.0


def add_seconds(run: Path, seconds: float) -> None:
    """Adds the training time of a command in seconds; logs a failed write."""
    path = run / SECONDS
    if not run.is_dir():  # the folder was renamed or deleted: a new folder would look like the run
        return
    try:
        write_json(path, round(read_seconds(run) + seconds, 3))
    except OSError as error:  # must not hide the reason why the run ended
        get_logger().warning("%s cannot be written (%s)", path, error.strerror)
