"""Shards, start and runs of a working folder, refused if they were made from something else."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from declutr.common.paths import expand
from declutr.common.storage import hash_file, hash_json, read_json
from declutr.common.stores.address import is_remote
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys
from declutr.pipeline.shards.manifest import MANIFEST, data_hash, load_manifest
from declutr.reproduction.item import ReproduceError
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.checkpoints.state import data_hashes
from declutr.trainer.driver.resolved import find_shards
from declutr.trainer.driver.run_checks import changes, other_shards, read_resume_settings
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.metrics.judged_pairs import FILES
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.geometry import with_geometry
from declutr.trainer.setup.scored import scored_contents

MADE_FROM = "made_from.json"
"""File of a run's folder with what `made_from` returned before it was trained."""
TRAINED_BY = "trained_by.json"
"""File of a run's folder with the commits, versions and hardware by which it was trained."""
_UNTRAINED = re.compile(r"untrained(@\d+)?:")


def shards_ready(config: PipelineConfig) -> bool:
    """True if the shards are complete.

    Raises:
        ReproduceError: they were prepared with other settings.
        ShardError: their manifest is damaged.
    """
    if not (Path(config.output) / MANIFEST).is_file():
        return False
    manifest = load_manifest(Path(config.output))
    if manifest.config_hash != config_hash(config):
        others = ", ".join(differing_keys(config, manifest.config))
        raise ReproduceError(f"{config.output}: was prepared with other settings ({others}); name another --work")
    return True


def run_ready(config: TrainConfig) -> bool:
    """True if the run has finished.

    Raises:
        ReproduceError: its folder has a run of other settings.
    """
    folder = Path(config.run)
    before = read_resume_settings(folder)
    if before is not None and (steps_in(folder / CHECKPOINTS) or (folder / SUMMARY).is_file()):
        contents, missing, _ = scored_contents(config)  # those that are not there now are not compared
        kept = with_geometry(config, folder, {})  # a run keeps the geometry it started with
        changed = changes(before, kept.with_contents(contents).resume_settings())
        if changed := [one for one in changed if not any(one.startswith(f"{key} was ") for key in missing)]:
            told = "; ".join(changed)
            raise ReproduceError(
                f"{folder}: was trained with other settings ({told}); name another --work, or delete it"
            )
    return (folder / SUMMARY).is_file()


def start_ready(config: TrainConfig) -> bool:
    """True if the run to start from has finished.

    Raises:
        ReproduceError: its folder has a run of other settings or shards.
    """
    shards = find_shards(config).manifests
    if shards and (found := other_shards(config, Path(config.run), data_hashes(shards))):
        raise ReproduceError(f"{found[0]}, or name another --work")
    return run_ready(config)


def made_from(config: TrainConfig) -> dict[str, Any]:
    """Encoders, judged pairs and checkpoints to choose from, which decide a run beside its settings and shards."""
    validation, best = config.validation, config.export == "best"
    frontends = {name: task.frontend.pretrained for name, task in config.auxiliary_tasks.items()}
    return {
        "start": encoder_identity(config.encoder.pretrained) if config.encoder.pretrained else "",
        **{f"frontend of {name}": encoder_identity(one) for name, one in frontends.items() if one},
        **{
            f"validation.{score.partition('_')[0]}": files_identity(expand(place), FILES[score].name)
            for score, place in validation.pairs.items()
        },
        "validation.data": _shards_identity(validation.data) if validation.data and validation.every_steps else None,
        "checkpoint.every_steps": config.checkpoint.every_steps if best else None,
        "validation.patience": validation.patience,
    }


def refuse_other(folder: Path, now: Mapping[str, Any]) -> None:
    """Refuses the folder of a run that was made from something else; what is not there now ("") is not compared.

    Raises:
        ReproduceError: it was.
    """
    if (path := folder / MADE_FROM).is_file():
        before = read_json(path)
        if changed := [key for key, value in now.items() if key in before and value not in ("", before[key])]:
            raise ReproduceError(
                f"{folder}: was trained with another {' and another '.join(changed)}; delete it, or name another --work"
            )


def encoder_identity(name: str) -> str:
    """Hash of an encoder's files; "" if they are not on this machine, such as those of a name at the hub.

    Of a run it is that of the export, or else of the newest checkpoint, as `load_encoder` takes them.

    Raises:
        ReproduceError: a file cannot be read.
    """
    place = expand(_UNTRAINED.sub("", name, count=1))
    if (place / EXPORT).is_dir():
        place = place / EXPORT
    elif (place / CHECKPOINTS).is_dir() and (steps := steps_in(place / CHECKPOINTS)):
        place = checkpoint_path(place / CHECKPOINTS, steps[-1])
    return files_identity(place)


def files_identity(folder: Path, pattern: str = "*") -> str:
    """Hash of the names and bytes of a file or of a folder's files, without hidden ones; "" without any.

    Raises:
        ReproduceError: one cannot be read.
    """
    try:
        found = [folder] if folder.is_file() else sorted(folder.rglob(pattern))
        files = [path for path in found if path.is_file() and path.name[0] != "."]
        times = [(path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return _hashed(folder, tuple(files), tuple(times)) if files else ""
    except OSError as error:
        raise ReproduceError(f"{folder}: cannot be read ({error.strerror})") from error


@cache
def _hashed(folder: Path, files: tuple[Path, ...], times: tuple[tuple[int, int], ...]) -> str:
    """Files with the same sizes and times are not read twice."""
    del times
    return hash_json({path.relative_to(folder).as_posix(): hash_file(path) for path in files})


def data_identity(config: TrainConfig) -> dict[str, str]:
    """Hash of the shards of each place that a run reads."""
    return {place: _shards_identity(place) for task in config.tasks().values() for place in task.places}


def _shards_identity(place: str) -> str:
    """Hash of shards; "" for those that are not on this machine."""
    if is_remote(place) or not (expand(place) / MANIFEST).is_file():
        return ""
    return data_hash(load_manifest(expand(place)))
