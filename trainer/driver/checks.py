"""Finds all problems of a training run that can be known before Ray starts."""

import sys
from pathlib import Path
from typing import Any

from common.cluster import cluster_problem, named_cluster
from common.config import ConfigError, flat_keys
from common.console.logs import get_logger
from common.records import DamagedError, read_record
from common.stores.retry import RemoteError
from pipeline.shards.content import MEDIA_KINDS
from pipeline.shards.manifest import Manifest, ShardError, load_manifest
from pipeline.shards.shards import check_shards
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from trainer.checkpoints.state import read_origin
from trainer.driver.device import DEVICE, device_problem, kept_device
from trainer.driver.objective_checks import data_problems, kind_problem
from trainer.driver.places import place_problems
from trainer.driver.validation_checks import validation_problems
from trainer.setup.branches import data_hashes, joint_hash
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import TrainConfig
from trainer.setup.geometry import DECISIVE
from trainer.worker.ray_internals import unsupported_ray


def problems(config: TrainConfig) -> list[str]:
    """All problems of this run, one line each: key, value, limit, remedy."""
    found = place_problems(config.model_dump())
    if any(problem.startswith("run = ") for problem in found):
        return found
    run = run_folder(config.run, config.cache)
    found += _run_problems(config, run)
    if problem := device_problem(config.scaling, run):
        found.append(problem)
    try:
        folder = data_folder(config.data, config.cache)
        manifest = load_manifest(folder)
    except (ShardError, RemoteError, OSError) as error:
        missing = any(problem.startswith("data = ") for problem in found)
        return found if missing else [*found, f"data = {config.data}: {error}"]
    found += [f"data = {config.data}: {problem}" for problem in check_shards(folder)]
    if manifest.content.kind in MEDIA_KINDS:
        return [
            *found,
            f"data = {config.data}: holds {manifest.content.kind}; the main branch reads texts, whose encoder is "
            "exported: name it in a branch (also.NAME.data)",
        ]
    others, manifests = _branch_shards(config)
    began_before = bool(checkpoint.steps_in(run / CHECKPOINTS))
    # The objective and the encoder of a run from scratch that has a checkpoint are not loaded for checks: with torch
    # and transformers that takes seconds of each start.
    from_scratch = began_before and config.encoder.pretrained is None and not config.also
    found += [line for line in others if line not in found]
    found += _main_problems(config, manifest, load=not from_scratch)
    if config.also:
        from trainer.driver.branch_checks import branch_problems

        found += branch_problems(config, {"": manifest, **manifests})
    if len(manifests) == len(config.also):
        found += _other_shards(config, run, data_hashes({"": manifest, **manifests}))
    if not began_before and (remark := config.objective.remark_before(config.context(manifest.short_documents))):
        get_logger().warning("%s", remark)
    if from_scratch or any(line.startswith("encoder.pretrained = ") for line in found):
        return found
    from trainer.driver.encoder_checks import encoder_problems

    return list(dict.fromkeys([*found, *encoder_problems(config, manifest)]))  # both parts load the objective


def _main_problems(config: TrainConfig, manifest: Manifest, load: bool) -> list[str]:
    """Problems of the main branch's objective, data and validation; `load`: also load the objective."""
    found = data_problems(config, manifest, load)
    return found if kind_problem(config, manifest) else [*found, *validation_problems(config, manifest)]


def _branch_shards(config: TrainConfig) -> tuple[list[str], dict[str, Manifest]]:
    """Problems of the shards of additional branches, and the manifests of those that can be read."""
    found, manifests = [], {}
    for name, branch in config.also.items():
        try:
            folder = data_folder(branch.data, config.cache)
            manifests[name] = load_manifest(folder)
        except (ShardError, RemoteError, OSError) as error:
            found.append(f"also.{name}.data = {branch.data}: {error}")  # `place_problems` may report it, too
        else:
            found += [f"also.{name}.data = {branch.data}: {problem}" for problem in check_shards(folder)]
    return found, manifests


def refuse(found: list[str]) -> None:
    """Raises an error that lists the problems, if any.

    Raises:
        ConfigError: the list is not empty.
    """
    if found:
        raise ConfigError("train", found)


def ray_problems(config: TrainConfig, run: Path, own_session: bool) -> list[str]:
    """Problems with Ray for this run: its version, a cluster that does not answer, too few GPUs on this machine.

    A finished run needs no Ray. Without `own_session`, another session of this process may use any cluster.
    """
    if (run / "summary.json").is_file():
        return []
    if problem := unsupported_ray():
        return [problem]
    if "ray" in sys.modules and sys.modules["ray"].is_initialized() and not own_session:
        return []
    scaling = config.scaling
    name, address = named_cluster(scaling.address)
    if address:
        problem = cluster_problem(name.replace("address", "scaling.address"), address)
        return [] if problem is None else [problem]
    try:
        device = kept_device(scaling, run)
    except DamagedError:  # `problems` reports it
        return []
    if device != "cuda":
        return []
    import torch

    gpus, least = torch.cuda.device_count(), scaling.least_workers
    if gpus >= least:
        return []
    kept = "" if scaling.device == "cuda" else f"this run was started on GPUs ({run / DEVICE}), "
    trained = steps_in(run / CHECKPOINTS)
    cpus = "start a new run with its weights: --fork NEW_RUN scaling.device=cpu" if trained else "set it to cpu"
    return [
        f"scaling.device = {scaling.device}: {kept}{least} workers need a GPU each, and this machine has {gpus} that "
        f"torch can use; {cpus}, lower scaling.workers, or name a cluster (scaling.address)"
    ]


def _run_problems(config: TrainConfig, run: Path) -> list[str]:
    """Problems of a folder that holds a run of another configuration, or a damaged `fork.json`."""
    found = []
    try:
        read_origin(run)
    except DamagedError as error:
        found.append(f"run = {config.run}: {error}")
    before = read_decisive(run)
    if before is None:
        return found + _other_checkpoints(config, run)
    changed = changes(before, config.decisive())
    if not changed:
        return found
    return [
        *found,
        f"run = {config.run}: holds a run of another configuration ({'; '.join(changed)}); name another folder, or "
        "start a new run with this run's weights: --fork NEW_RUN",
    ]


def read_decisive(run: Path) -> dict[str, Any] | None:
    """Reads the settings that decide a run's result; None if the file is missing, or damaged, which is logged."""
    path = run / DECISIVE
    if not path.is_file():
        return None
    try:
        found = read_record(path, dict[str, Any])
        if not isinstance(found.get("encoder"), dict):
            raise DamagedError(f"{path} is damaged: it holds no configuration")
    except DamagedError as error:
        get_logger().warning("%s; reading the run's checkpoints instead", error)
        return None
    return found


def _other_checkpoints(config: TrainConfig, run: Path) -> list[str]:
    """A problem if a checkpoint has another configuration, used when `decisive.json` cannot be read."""
    for step, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.config_hash != config.hash():
            path = checkpoint.checkpoint_path(run / CHECKPOINTS, step)
            return [
                f"run = {config.run}: {path.name} is of another configuration, and {DECISIVE}, which lists the "
                "settings, is missing or damaged; name another folder"
            ]
    return []


def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Differences between two decisive configurations, one line a key."""
    old, new = flat_keys(before), flat_keys(now)
    return [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(set(old) | set(new))
        if old.get(key) != new.get(key)
    ]


def _other_shards(config: TrainConfig, run: Path, now: dict[str, str]) -> list[str]:
    """Problems of a run that was trained on shards of other hashes; its next steps would read the wrong documents."""
    places = {name: f"{f'also.{name}.data' if name else 'data'} = {config.branches()[name].data}" for name in now}
    for _, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.data_hash != joint_hash(now):
            before = state.branch_hashes
            changed = [places[name] for name in now if name in before and before[name] != now[name]] or places.values()
            return [
                f"run = {config.run}: was trained on other shards than {' or '.join(changed)} holds now; "
                "name another folder for the run, or restore the shards"
            ]
    return []
