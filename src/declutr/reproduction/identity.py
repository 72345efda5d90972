"""Identity of a run: its settings and the bytes of what it reads, not its folder.

Scores of other settings, shards, encoders, judged pairs or SentEval files are never shown, and their folders are
refused.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from declutr.common.config import flat_keys
from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file, hash_json, read_json
from declutr.common.stores.address import is_remote
from declutr.evaluation.senteval.harness import VERSIONS
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys
from declutr.pipeline.config import identity as shard_identity
from declutr.pipeline.shards.manifest import MANIFEST, data_hash, load_manifest
from declutr.reproduction.plan import ItemPlan, PlannedRun
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.driver.continuation import SUMMARY, changes
from declutr.trainer.metrics.judged_pairs import FILES
from declutr.trainer.setup.config import TrainConfig

_ABSENT = "not on this machine"
"""Content of what cannot be read here: an encoder at the hub, shards in a store or not yet prepared."""


def made_from(config: TrainConfig) -> dict[str, Any]:
    """What decides a run: settings by dotted key, and contents (hashes) of the shards, encoders and pairs it reads.

    Raises:
        UsageError: a file cannot be read.
    """
    validation, best = config.validation, config.export == "best"
    values = flat_keys(config.resume_settings())
    for name, task in config.tasks().items():
        prefix = f"auxiliary_tasks.{name}." if name else ""
        values[f"{prefix}data (content)"] = [*map(_shards_content, task.places)]
        if place := (config.auxiliary_tasks[name].frontend if name else config.encoder).pretrained:
            values[f"{prefix or 'encoder.'}pretrained (content)"] = encoder_content(place)
    for score, place in validation.pairs.items():
        values[f"validation.{score.partition('_')[0]}"] = _content(expand(place), FILES[score].name)
    if validation.data:
        values["validation.data"] = _shards_content(validation.data) if validation.every_steps else None
    values["checkpoint.every_steps"] = config.checkpoint.every_steps if best else None  # of these one is chosen
    values["validation.patience"] = validation.patience
    return values


def encoder_content(name: str) -> str:
    """Hash of an encoder's files; of a run, those of its export or else of its newest checkpoint, as it is loaded.

    Raises:
        UsageError: a file cannot be read.
    """
    place = expand(re.sub(r"^untrained(@\d+)?:", "", name))
    if (place / EXPORT).is_dir():
        place = place / EXPORT
    elif (place / CHECKPOINTS).is_dir() and (steps := steps_in(place / CHECKPOINTS)):
        place = checkpoint_path(place / CHECKPOINTS, steps[-1])
    return _content(place)


def _content(place: Path, pattern: str = "*") -> str:
    """Hash of the names and bytes of a file, or of a folder's files without hidden ones."""
    try:
        paths = [place] if place.is_file() else sorted(place.rglob(pattern))
        files = [path for path in paths if path.is_file() and path.name[0] != "."]
        return _hashed(place, tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))
    except OSError as error:
        raise UsageError(f"{place}: cannot be read ({error.strerror})") from error


@cache
def _hashed(place: Path, files: tuple[tuple[Path, int, int], ...]) -> str:
    """Files with the same sizes and times are not read twice."""
    contents = {path.relative_to(place).as_posix(): hash_file(path) for path, _, _ in files}
    return hash_json(contents)[:16] if contents else _ABSENT


def _shards_content(place: str) -> str:
    """Hash of shards."""
    if is_remote(place) or not (expand(place) / MANIFEST).is_file():
        return _ABSENT
    return data_hash(load_manifest(expand(place)))[:16]


def record_of(config: TrainConfig) -> Path:
    """File beside a run's folder with what `made_from` returned before it was trained."""
    return Path(f"{config.run}.made_from.json")


def run_ready(config: TrainConfig) -> bool:
    """True if a run, or the start, has finished. What is not on this machine now is not compared.

    Raises:
        UsageError: its folder has a run of other settings or data.
    """
    run, now = Path(config.run), made_from(config)
    if record_of(config).is_file():
        before = read_json(record_of(config))
        absent = [key for key, value in now.items() if _ABSENT in (value if isinstance(value, list) else [value])]
        if changed := changes(before, now | {key: before[key] for key in absent if key in before}):
            raise UsageError(
                f"{run}: was trained with other settings or data ({'; '.join(changed)}); delete it, or name another "
                "--work"
            )
    elif steps_in(run / CHECKPOINTS) or (run / SUMMARY).is_file():
        raise UsageError(f"{run}: has a run, and no {record_of(config).name} beside it; name another --work")
    return (run / SUMMARY).is_file()


def shards_ready(config: PipelineConfig) -> bool:
    """True if the shards are complete.

    Raises:
        UsageError: they were prepared with other settings.
        ShardError: their manifest is damaged.
    """
    if not (Path(config.output) / MANIFEST).is_file():
        return False
    manifest = load_manifest(Path(config.output))
    if manifest.config_hash != config_hash(config):
        others = ", ".join(differing_keys(shard_identity(config), manifest.config))
        raise UsageError(f"{config.output}: was prepared with other settings ({others}); name another --work")
    return True


def identity(plan: ItemPlan, run: PlannedRun) -> str:
    """Hash of what decides the scores of a run, beside the data of its tasks."""
    trained = made_from(run.config) if run.config else None
    scored = [run.encoder.model_dump(mode="json"), encoder_content(run.encoder.name)] if run.encoder else None
    columns = {name: column.model_dump(mode="json") for name, column in plan.columns.items()}
    return hash_json([trained, scored, columns, plan.classifier.model_dump(mode="json"), dict(VERSIONS)])


def scores_of(plan: ItemPlan, run: PlannedRun, data: str | None = None) -> dict[str, Any] | None:
    """Scores and seconds of a finished run; None if it has none of these settings, or of other data.

    Args:
        plan: the item.
        run: the run.
        data: hash of the tasks' data; None: any.
    """
    try:
        record: dict[str, Any] = read_json(run.folder / "scores.json")
    except (FileNotFoundError, ValueError):
        return None
    same = isinstance(record, dict) and record.get("identity") == identity(plan, run)
    return record if same and data in (None, record["data"]) else None
