"""Finds all problems of a training run that can be known before Ray starts."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from declutr.common.cluster import cluster_problem, named_cluster
from declutr.common.config import flat_keys
from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError, ConfigError, DamagedError
from declutr.common.storage import hash_json, read_record
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.shards.shards import check_shards
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_among, steps_in
from declutr.trainer.checkpoints.state import data_hashes, joint_hash
from declutr.trainer.driver.device import DEVICE, device_problem, kept_device
from declutr.trainer.driver.path_checks import place_problems
from declutr.trainer.driver.resolved import Found, ResolvedRun, data_places, find_shards
from declutr.trainer.driver.shard_checks import data_problems, kind_problem, objective_problems, validation_problems
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.setup.cache import data_folder, run_folder
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.corpora import corpora_problems
from declutr.trainer.setup.geometry import RESUME_SETTINGS, with_geometry
from declutr.trainer.setup.scaling import ScalingConfig


def resolve(config: TrainConfig, of_run: bool = True) -> ResolvedRun:
    """Looks up the places of a run, once; without torch.

    Args:
        config: of the run.
        of_run: refuse also what is wrong with the run's folder, such as another run's results in it.

    Raises:
        ConfigError: with every problem that the files of the run and the manifests of its shards show, one line each.
    """
    problems = place_problems(config.model_dump())
    no_place = any(line.startswith("run = ") for line in problems)
    if no_place and of_run:
        raise ConfigError("train", problems)
    run, shards = run_folder(config.run, config.cache), find_shards(config)
    config = with_geometry(config, run, shards.manifests).with_contents(shards.contents)
    if not no_place:
        problems += run_problems(config, run, shards)
        if problem := device_problem(config.scaling, run):
            problems.append(problem)
    problems += [
        line
        for key, line in shards.unreadable.items()
        if not any(problem.startswith(f"{key} = ") for problem in problems)
    ]
    problems += [
        f"{key} = {place}: {problem}"
        for name, places in data_places(config).items()
        if name in shards.manifests
        for (key, place), folder in zip(places.items(), shards.data[name], strict=True)
        for problem in check_shards(folder)
    ]
    if shards.scored is not None and (place := config.validation.data):
        problems += [f"validation.data = {place}: {line}" for line in check_shards(data_folder(place, config.cache))]
    if "" in shards.manifests:
        problems += _manifest_problems(config, shards)
        if not no_place and len(shards.manifests) == len(config.tasks()):
            problems += other_shards(config, run, data_hashes(shards.manifests))
    refuse([line for line in problems if of_run or not line.startswith("run = ")])
    return ResolvedRun(config, run, shards.data, shards.manifests, shards.scored)


def _manifest_problems(config: TrainConfig, shards: Found) -> list[str]:
    """Problems of settings that do not fit the shards."""
    manifests, problems = shards.manifests, []
    main = manifests[""]
    if main.content.kind in MEDIA_KINDS:
        return [
            f"data = {config.places[0]}: holds {main.content.kind}; the main task reads texts, whose encoder is "
            "exported: name it in an auxiliary task (auxiliary_tasks.NAME.data)"
        ]
    for name, task in config.tasks().items():
        if name in manifests:
            prefix = f"auxiliary_tasks.{name}." if name else ""
            problems += corpora_problems(data_places(config)[name], shards.corpora[name])
            problems += [f"{prefix}{line}" for line in data_problems(task, shards.corpora[name])]
            problems += [f"{prefix}{line}" for line in _misfits(config, name, manifests)] if name else []
    if kind_problem(config, main) is None:
        problems += validation_problems(config, shards.corpora, shards.scored)
    return problems


def load_problems(run: ResolvedRun) -> list[str]:
    """Problems that show when objective and encoder are loaded, with torch and transformers."""
    config = run.config
    began_before = bool(steps_in(run.folder / CHECKPOINTS))
    # The objective and the encoder of a run from scratch that has a checkpoint are not loaded for checks: with torch
    # and transformers that takes seconds of each start.
    from_scratch = began_before and config.encoder.pretrained is None and not config.auxiliary_tasks
    problems = [] if from_scratch else objective_problems(config)
    if config.auxiliary_tasks:
        from declutr.trainer.driver.encoder_checks import task_problems

        problems += task_problems(run)
    sizes = run.training_shards[""].sizes if config.part is not None else ()
    problems += [
        f"data_fraction = {config.data_fraction}: leaves {size} training {run.manifest.noun} of {place}, fewer than "
        f"the {need} that batch_documents = {config.batch_documents} may need; increase it"
        for place, size, need in zip(config.places, sizes, run.plan.most_in_batch(), strict=False)
        if size < need
    ]
    remark = None if began_before else config.objective.remark_before(config.context(run.manifest.short_documents))
    if remark:
        get_logger().warning("%s", remark)
    if from_scratch:
        return problems
    from declutr.trainer.driver.encoder_checks import encoder_problems

    return list(dict.fromkeys([*problems, *encoder_problems(run)]))  # both parts load the objective


def _misfits(config: TrainConfig, name: str, manifests: Mapping[str, Manifest]) -> list[str]:
    """Problems of a task whose texts do not fit its settings or the main task."""
    task, main, own = config.auxiliary_tasks[name], manifests[""], manifests[name]
    places = config.of_task(name).places
    if own.content.kind in MEDIA_KINDS:
        return []
    problems = []
    if task.frontend.model_fields_set:
        problems.append(f"frontend: the shards hold {own.content.kind}, which have no patches; remove it")
    if main.tokenizer and own.tokenizer and main.tokenizer.fingerprint != own.tokenizer.fingerprint:
        problems.append(
            f"data = {places[0]}: was prepared with another tokenizer than data = {config.places[0]}; prepare it "
            "with that one"
        )
    return problems


def refuse(problems: list[str]) -> None:
    """Raises an error that lists the problems, if any.

    Raises:
        ConfigError: the list is not empty.
    """
    if problems:
        raise ConfigError("train", problems)


def ray_problems(config: TrainConfig, run: Path, own_session: bool) -> list[str]:
    """Problems with Ray for this run: a cluster that does not answer, too few GPUs on this machine.

    A finished run needs no Ray, nor does one in this process. Without `own_session`, another session of this process
    may use any cluster.
    """
    if (run / SUMMARY).is_file():
        return []
    if config.scaling.local:
        return _gpu_problems(config.scaling, run)
    if "ray" in sys.modules and sys.modules["ray"].is_initialized() and not own_session:
        return []
    scaling = config.scaling
    name, address = named_cluster(scaling.address)
    if address:
        problem = cluster_problem(name.replace("address", "scaling.address"), address)
        return [] if problem is None else [problem]
    return _gpu_problems(scaling, run)


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


# Checks the folder of a run against the settings and shards with which the run began.


def run_problems(config: TrainConfig, run: Path, shards: Found) -> list[str]:
    """Problems of a folder that holds a run of another configuration.

    A run without a checkpoint has computed nothing yet, so that its settings may still change.
    """
    remote = is_remote(config.run)  # the copy here may lack its checkpoints
    began = steps_among((Folder(config.run) / CHECKPOINTS).names()) if remote else steps_in(run / CHECKPOINTS)
    if not began or any(key.startswith("validation.") for key in shards.unreadable):
        return []
    before = read_resume_settings(run)
    changed = [] if before is None else changes(before, config.resume_settings())
    if not changed:
        return other_checkpoints(config, run)
    return [
        f"run = {config.run}: holds a run of another configuration ({'; '.join(changed)}); name another folder; "
        f"encoder.pretrained={config.run}/export starts a new run with this run's weights, once it is exported"
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


def other_checkpoints(config: TrainConfig, run: Path) -> list[str]:
    """A problem if a checkpoint has another configuration; no worker would take it, and the run would begin again."""
    for step, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.config_hash != config.hash():
            path = checkpoint.checkpoint_path(run / CHECKPOINTS, step)
            return [
                f"run = {config.run}: {path.name} is of another configuration, and {RESUME_SETTINGS}, which lists the "
                "settings, is missing, damaged or of another version; name another folder"
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
        if key not in old or key not in new or hash_json(old[key]) != hash_json(new[key])
    ]


def other_shards(config: TrainConfig, run: Path, now: dict[str, str]) -> list[str]:
    """Problems of a run that was trained on shards of other hashes; its next steps would read the wrong documents."""
    places = {name: " or ".join(f"{key} = {place}" for key, place in data_places(config)[name].items()) for name in now}
    for _, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.data_hash != joint_hash(now):
            before = state.task_hashes
            changed = [places[name] for name in now if name in before and before[name] != now[name]] or places.values()
            order = " and their order" if len(config.places) > 1 else ""
            return [
                f"run = {config.run}: was trained on other shards than {' or '.join(changed)} holds now; "
                f"name another folder for the run, or restore the shards{order}"
            ]
    return []


def refuse_lost_steps(run: Path, done: int) -> None:
    """Refuses to take the steps of a finished run again.

    Args:
        run: folder of the run.
        done: step of its newest whole checkpoint; 0 without.

    Raises:
        CheckpointError: the checkpoints are gone or broken.
    """
    if done == 0 and (run / SUMMARY).is_file():
        raise CheckpointError(
            f"{run}: has finished ({SUMMARY}), and no whole checkpoint is in {CHECKPOINTS}: the run would begin again "
            "and replace its results; name another folder, or delete this one"
        )
