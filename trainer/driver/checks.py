"""What can be known to be wrong with a training run before Ray starts, all of it at once."""

import sys
from pathlib import Path
from typing import Any

import torch

from common.cluster import cluster_problem, named_cluster
from common.config import ConfigError, flat_keys
from common.console.logs import get_logger
from common.records import DamagedError, read_record
from common.stores.retry import RemoteError
from pipeline.shards.manifest import Manifest, ShardError, data_hash, load_manifest
from pipeline.shards.shards import check_shards
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.checkpoints.state import read_origin
from trainer.driver.encoder_checks import encoder_problems
from trainer.driver.places import place_problems
from trainer.objectives.declutr.ease import small_batch
from trainer.objectives.declutr.ntxent import MetricLearningConfig, MetricLearningLoss
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import TrainConfig

DECISIVE = "decisive.json"


def problems(config: TrainConfig) -> list[str]:
    """Everything that is wrong with this run, one line a problem: key, value, limit, what to do."""
    found = place_problems(config)
    if any(problem.startswith("run = ") for problem in found):
        return found
    found += _run_problems(config, run_folder(config))
    try:
        folder = data_folder(config)
        manifest = load_manifest(folder)
    except (ShardError, RemoteError, OSError) as error:
        missing = any(problem.startswith("data = ") for problem in found)
        return found if missing else [*found, f"data = {config.data}: {error}"]
    found += [f"data = {config.data}: {problem}" for problem in check_shards(folder)]
    found += [
        *_other_shards(config, run_folder(config), manifest),
        *_data_problems(config, manifest),
        *_objective_problems(config),
    ]
    if not checkpoint.steps_in(run_folder(config) / CHECKPOINTS) and (remark := small_batch(config)):
        get_logger().warning("%s", remark)
    if _began_before(config, run_folder(config)) or any(line.startswith("encoder.pretrained = ") for line in found):
        return found
    return [*found, *encoder_problems(config, manifest)]


def refuse(found: list[str]) -> None:
    """Stops with all problems, if there are any.

    Raises:
        ConfigError: there are.
    """
    if found:
        raise ConfigError("train", found)


def ray_problems(config: TrainConfig, run: Path, own_session: bool) -> list[str]:
    """The parts that Ray lacks for this run: a cluster that answers, or a GPU for every worker on this machine.

    Args:
        config: of the run.
        run: its folder; a finished run needs no Ray.
        own_session: Ray was started for this run; another session of this process may be of any cluster.
    """
    others = "ray" in sys.modules and sys.modules["ray"].is_initialized() and not own_session
    if others or (run / "summary.json").is_file():
        return []
    scaling = config.scaling
    name, address = named_cluster(scaling.address)
    if address:
        problem = cluster_problem(name.replace("address", "scaling.address"), address)
        return [] if problem is None else [problem]
    gpus = torch.cuda.device_count()
    if scaling.device == "cuda" and gpus < scaling.least_workers:
        return [
            f"scaling.device = cuda: {scaling.least_workers} workers need a GPU each, and this machine has {gpus} that "
            "torch can use; set it to cpu or auto, lower scaling.workers, or name a cluster (scaling.address)"
        ]
    return []


def _run_problems(config: TrainConfig, run: Path) -> list[str]:
    """The folder holds a run of another configuration, or does not tell where it was forked."""
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
        "begin one with this run's weights: --fork NEW_RUN",
    ]


def read_decisive(run: Path) -> dict[str, Any] | None:
    """The configuration that decided a run's result; None where its file is missing or, which is logged, damaged."""
    path = run / DECISIVE
    if not path.is_file():
        return None
    try:
        found = read_record(path, dict[str, Any])
        if not isinstance(found.get("encoder"), dict):
            raise DamagedError(f"{path} is damaged: it holds no configuration")
    except DamagedError as error:
        get_logger().warning("%s; the run's checkpoints are asked instead", error)
        return None
    return found


def _other_checkpoints(config: TrainConfig, run: Path) -> list[str]:
    """Checkpoints of another configuration, where no file is left that names what differs."""
    for step, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.config_hash != config.hash():
            path = checkpoint.checkpoint_path(run / CHECKPOINTS, step)
            return [
                f"run = {config.run}: {path.name} is of another configuration, and {DECISIVE}, which would tell what "
                "differs, is missing or damaged; name another folder"
            ]
    return []


def _began_before(config: TrainConfig, run: Path) -> bool:
    """Has this very run trained already, from scratch? Its encoder need not be built again, which takes seconds."""
    return config.encoder.pretrained is None and bool(checkpoint.steps_in(run / CHECKPOINTS))


def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """What differs between two decisive configurations, one line a key."""
    old, new = flat_keys(before), flat_keys(now)
    return [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(set(old) | set(new))
        if old.get(key) != new.get(key)
    ]


def _other_shards(config: TrainConfig, run: Path, manifest: Manifest) -> list[str]:
    """The folder holds a run of other shards: its next steps would read other documents than its plan says."""
    for _, state in checkpoint.states_in(run / CHECKPOINTS):
        if state.data_hash != data_hash(manifest):
            return [
                f"run = {config.run}: was trained on other shards than data = {config.data} holds now; "
                "name another folder"
            ]
    return []


def _data_problems(config: TrainConfig, manifest: Manifest) -> list[str]:
    found = []
    spans, geometry = config.spans, manifest.geometry
    if spans.max_tokens > geometry.max_tokens:
        found.append(
            f"spans.max_tokens = {spans.max_tokens}: the shards' windows were made for {geometry.max_tokens}; use at "
            "most that, or prepare the corpus again with a larger geometry.max_tokens"
        )
    if spans.num_anchors > geometry.num_anchors and manifest.short_documents != "fewer_anchors":
        found.append(
            f"spans.num_anchors = {spans.num_anchors}: the shards keep documents that hold {geometry.num_anchors}; "
            "prepare the corpus again with a larger geometry.num_anchors"
        )
    if spans.min_tokens > geometry.min_tokens and manifest.short_documents == "shrink_spans":
        found.append(
            f"spans.min_tokens = {spans.min_tokens}: short documents in the shards have windows of "
            f"{geometry.min_tokens} tokens and more; lower it, or prepare again with a larger geometry.min_tokens"
        )
    if config.batch_documents > manifest.totals["kept_train"]:
        found.append(
            f"batch_documents = {config.batch_documents}: the shards hold only {manifest.totals['kept_train']} "
            "training documents, and a batch must not contrast a document with itself"
        )
    if config.validation.every_steps and manifest.totals["kept_held_out"] < 2:
        found.append(
            f"validation.every_steps = {config.validation.every_steps}: the shards hold "
            f"{manifest.totals['kept_held_out']} held-out documents, at least 2 are needed; prepare with a larger "
            "held_out_share, or set it to 0"
        )
    return found


def _objective_problems(config: TrainConfig) -> list[str]:
    if isinstance(config.objective.loss, MetricLearningConfig):
        try:
            MetricLearningLoss(config.objective.loss)
        except ValueError as error:
            return [str(error)]
    return []
