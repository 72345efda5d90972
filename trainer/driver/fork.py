"""A new run that starts from another run's checkpoint, with another configuration.

The fork copies the weights, the optimizer's moments, the step (and thus the position in the data and in the learning
rate schedule), the metrics up to it, and the state of the objective. The old run is only read.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from declutr.common.config import ConfigError
from declutr.common.console.logs import get_logger
from declutr.common.paths import expand
from declutr.common.storage import atomic_folder, write_json, write_text
from declutr.common.stores.address import is_remote
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.state import FORK, RunState, data_hashes, joint_hash, read_origin
from declutr.trainer.checkpoints.weights import load_objective, load_task
from declutr.trainer.driver.checks import load_problems, refuse, resolve
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.driver.run_checks import changes, read_resume_settings
from declutr.trainer.metrics.metrics import METRICS, read_metrics
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.build import build_encoder, build_objective, load_tokenizer
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.geometry import RESUME_SETTINGS
from declutr.trainer.setup.tasks import build_task
from declutr.trainer.step.microbatch import Microbatch

_ORDER = ("seed", "batch_documents", "data.weight", "data_fraction")
"""Settings that decide the order of documents."""


def fork(config: TrainConfig, new_run: str) -> TrainConfig:
    """Makes the folder of a new run from the newest good checkpoint of `config.run`; keeps an existing fork.

    Args:
        config: configuration of the new run, except that `run` is still the old one.
        new_run: folder of the new run.

    Returns:
        The configuration of the new run.

    Raises:
        ConfigError: the old run has no checkpoint, the new folder holds something else, or shapes differ.
        DamagedError: `fork.json` of the new folder is damaged.
    """
    if is_remote(config.run) or is_remote(new_run):
        raise ConfigError(
            "train", ["--fork takes and makes folders: fetch the run first (declutr pull ADDRESS FOLDER)"]
        )
    old, new = expand(config.run).absolute(), expand(new_run).absolute()
    forked = config.model_copy(update={"run": new_run})
    origin = read_origin(new)
    if origin is not None and origin.folder == str(old):
        return forked
    if new.exists():
        raise ConfigError(
            "train", [f"--fork {new_run}: exists already and is not a fork of {config.run}; name a new folder"]
        )
    resolved = resolve(forked)
    refuse(load_problems(resolved))
    config, manifests = resolved.config, resolved.manifests
    found = checkpoint.find_latest(old / CHECKPOINTS)
    if found is None:
        raise ConfigError("train", [f"run = {old}: has no good checkpoint to fork from"])
    path, state = found
    steps = config.total_steps(resolved.plan)
    before = read_resume_settings(old) or {}
    wrong = [*_misfits(resolved, path), *_other_moments(config, before)]
    if state.step >= steps:
        wrong.append(
            f"--fork {new_run}: {old} is at step {state.step} already, the new run ends at {steps}; increase steps"
        )
    refuse(wrong)
    hashes = data_hashes(manifests)
    data = joint_hash(hashes)
    now = config.resume_settings()
    if hashes[""] != state.task_hashes.get("", state.data_hash) or any(
        before.get(key) != now.get(key) for key in _ORDER
    ):
        rows = zip(config.places, resolved.plan.rows_read(state.step), strict=True)
        told = ", ".join(f"{place} from row {row + 1:,}" for place, row in rows)
        get_logger().info("--fork: another order of documents; it reads %s, so rows may repeat or be left out", told)
    with atomic_folder(new) as aside:
        folder = checkpoint.checkpoint_path(aside / CHECKPOINTS, state.step)
        shutil.copytree(path, folder)
        files = _kept_tasks(config, folder, state)
        renewed = state.model_copy(
            update={
                "config_hash": config.hash(),
                "data_hash": data,
                "task_hashes": hashes if config.auxiliary_tasks else {},
                "files": files,
                "tasks_skipped": {name: n for name, n in state.tasks_skipped.items() if name in config.auxiliary_tasks},
                "scores": {},  # a fork starts with these weights, and validates them by its own settings
                "reported": None,
                "sizes": {name: (folder / name).stat().st_size for name in files},
            }
        )
        write_json(folder / "state.json", renewed.model_dump(mode="json"))
        lines = [line for line in read_metrics(old) if line["step"] <= state.step]
        write_text(aside / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        write_json(aside / RESUME_SETTINGS, now)
        write_json(aside / FORK, {"from": str(old), "step": state.step, "changed": changes(before, now)})
    return config


def _other_moments(config: TrainConfig, before: Mapping[str, Any]) -> list[str]:
    """Optimizers whose moments the fork cannot continue: with bias correction they count steps, without they do not."""
    found = []
    for name, task in config.tasks().items():
        old = before.get("auxiliary_tasks", {}).get(name, {}) if name else before
        was = (old.get("optim") or {}).get("bias_correction")
        if was is not None and was != task.optim.bias_correction:
            key = f"auxiliary_tasks.{name}.optim.bias_correction" if name else "optim.bias_correction"
            found.append(f"{key} = {task.optim.bias_correction}: the run had {was}, and a fork keeps its moments")
    return found


def _kept_tasks(config: TrainConfig, folder: Path, state: RunState) -> dict[str, str]:
    """Checksums of the files that the fork keeps; deletes and logs those of tasks that it no longer has."""
    kept = dict(state.files)
    for file in state.files:
        name, _, rest = file.partition(".")
        if rest.count(".") and name not in config.auxiliary_tasks:
            (folder / file).unlink()
            del kept[file]
    dropped = sorted({file.partition(".")[0] for file in set(state.files) - set(kept)})
    if dropped:
        get_logger().info("--fork: leaving out the tasks %s of the old run", ", ".join(dropped))
    return kept


def _misfits(run: ResolvedRun, path: Path) -> list[str]:
    """Parts of the checkpoint that the new configuration's encoder, objectives and frontends cannot take over."""
    config = run.config
    tokenizer, _ = load_tokenizer(run.data[""][0], run.manifest)
    encoder = build_encoder(config, tokenizer)
    with safe_open(path / checkpoint.ENCODER, "pt") as stream:  # reads only the header
        stored = {name: stream.get_slice(name).get_shape() for name in stream.keys()}  # noqa: SIM118 - not a dict
    wanted = {name: list(parameter.shape) for name, parameter in encoder.named_parameters()}
    different = [
        f"{name} is {stored.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the new encoder"
        for name in sorted(set(stored) | set(wanted))
        if stored.get(name) != wanted.get(name)
    ]
    found = []
    if different:
        found.append(f"encoder: {path} has {len(different)} different shapes: {'; '.join(different[:3])}")
    try:
        load_objective(path, build_objective(config, encoder, run.manifest))
    except checkpoint.CheckpointError as error:
        found.append(f"objective = {config.objective.kind}: {error}; a fork keeps the objective's kind and layers")
    for name in config.auxiliary_tasks:
        task = build_task(config, name, encoder, run.manifests[name], Communicator(), Microbatch())
        try:
            load_task(path, task)
        except checkpoint.CheckpointError as error:
            found.append(
                f"auxiliary_tasks.{name}: {error}; a fork keeps a task's frontend and layers, or gives the task "
                "a new name"
            )
    return found
