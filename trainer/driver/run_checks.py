"""Checks the folder of a run against the settings and shards with which the run began."""

from pathlib import Path
from typing import Any

from declutr.common.config import flat_keys
from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError, DamagedError
from declutr.common.storage import hash_json, read_record
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_among, steps_in
from declutr.trainer.checkpoints.state import joint_hash
from declutr.trainer.driver.resolved import Found, data_places
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.geometry import RESUME_SETTINGS


def run_problems(config: TrainConfig, run: Path, shards: Found) -> list[str]:
    """Problems of a folder that holds a run of another configuration, or a fork of an earlier version.

    A run without a checkpoint has computed nothing yet, so that its settings may still change.
    """
    if problem := fork_problem(run):
        return [f"run = {config.run}: {problem}"]
    if not _has_checkpoints(config, run) or any(key.startswith("validation.") for key in shards.unreadable):
        return []
    before = read_resume_settings(run)
    changed = [] if before is None else changes(before, config.resume_settings())
    if not changed:
        return other_checkpoints(config, run)
    return [
        f"run = {config.run}: holds a run of another configuration ({'; '.join(changed)}); name another folder; "
        f"encoder.pretrained={config.run}/export starts a new run with this run's weights, once it is exported"
    ]


def fork_problem(run: Path) -> str | None:
    """Why a folder that `train --fork` of an earlier version made is not continued; None of other folders.

    Its first steps are another run's, with other settings and documents, which nothing here would tell apart.
    """
    if not (run / "fork.json").is_file():
        return None
    return (
        "was made by `train --fork` of an earlier version (fork.json), whose runs this version does not continue; "
        "start a new run with the weights of an export, encoder.pretrained=RUN/export"
    )


def _has_checkpoints(config: TrainConfig, run: Path) -> bool:
    """True if the run has a checkpoint, whole or not; of a run in a store, whose copy here may lack them, there."""
    if not is_remote(config.run):
        return bool(steps_in(run / CHECKPOINTS))
    return bool(steps_among((Folder(config.run) / CHECKPOINTS).names()))


def read_resume_settings(run: Path) -> dict[str, Any] | None:
    """Reads the settings that decide a run's result; None if the file is missing, or damaged, which is logged."""
    path = run / RESUME_SETTINGS
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

    def told(tree: dict[str, object], key: str) -> str:
        return repr(tree[key]) if key in tree else "not set"

    return [
        f"{key} was {told(old, key)}, now {told(new, key)}"
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
