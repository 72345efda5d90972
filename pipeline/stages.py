"""The stages of a preparation on Ray Data, each a list of units of which the finished ones are skipped.

Without duplicates to be removed there is one: units are read and written. With them there are three: units are read and
written as candidates, copies are found over all units, units are written again without them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from common.logs import get_logger
from common.storage import fsync_path
from pipeline.config import PipelineConfig
from pipeline.duplicates.keys import KeysError
from pipeline.duplicates.search import find_duplicates
from pipeline.duplicates.table import DUPLICATES
from pipeline.manifest import ShardError, Sidecar
from pipeline.progress import Progress
from pipeline.sample import output_engine
from pipeline.selection import select_unit
from pipeline.session import start_ray
from pipeline.tokenization import TokenizerInfo
from pipeline.unit_writer import finished_sidecar
from pipeline.units import Unit, largest_first
from pipeline.worker import prepare_unit, stage_folder

Task = Callable[..., dict[str, str]]


def run_stages(config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo) -> list[Sidecar]:
    """Does what is missing in the output folder; returns the sidecars of all units in plan order."""
    arguments = {"folder": str(folder), "config": config, "tokenizer": tokenizer}
    stage = stage_folder(folder, config)
    if stage != folder:
        # Once the copies are known, only units whose own files are missing are read again.
        known = (folder / DUPLICATES).exists()
        missing = [unit for unit in units if finished_sidecar(unit, folder, config) is None]
        _run("prepare", prepare_unit, missing if known else units, stage, folder, config, arguments)
        if not known:
            try:
                found = find_duplicates(stage, [unit.name for unit in units], config.duplicates, config.session)
            except (KeysError, RayTaskError) as error:
                raise _in_words("duplicates", folder, error) from error
            found.replace(folder / DUPLICATES)
            fsync_path(folder)
        return _run("select", select_unit, units, folder, folder, config, arguments)
    return _run("prepare", prepare_unit, units, folder, folder, config, arguments)


def _run(
    name: str,
    task: Task,
    units: Sequence[Unit],
    stage: Path,
    folder: Path,
    config: PipelineConfig,
    arguments: dict[str, Any],
) -> list[Sidecar]:
    """Sidecars of the units in order: the finished ones in `stage` as they are, the others through Ray Data."""
    found = [finished_sidecar(unit, stage, config) for unit in units]
    done = [sidecar for sidecar in found if sidecar]
    sidecars = {sidecar.unit: sidecar for sidecar in done}
    todo = largest_first([unit for unit, sidecar in zip(units, found, strict=True) if sidecar is None])
    if done:
        get_logger().info("%s: %d of %d units are finished already", name, len(done), len(units))
    if todo:
        if task is prepare_unit:
            arguments = arguments | {"engine": output_engine(config, folder, units)}
        start_ray(config.session.num_cpus, config.session.address)
        # One block a unit: a task that dies is retried alone. The order in which they end does not matter.
        rows = ray.data.from_items([{"unit": unit.model_dump_json()} for unit in todo], override_num_blocks=len(todo))
        results = rows.map(task, fn_kwargs=arguments, num_cpus=1)
        with Progress(folder, name, sum(unit.num_bytes for unit in units), done) as progress:
            try:
                for row in results.iter_rows():
                    sidecar = Sidecar.model_validate_json(row["sidecar"])
                    sidecars[sidecar.unit] = sidecar
                    progress.add(sidecar)
            except RayTaskError as error:
                raise _in_words(name, folder, error) from error
    return [sidecars[unit.name] for unit in units]


def _in_words(name: str, folder: Path, error: Exception) -> Exception:
    """What stopped a stage, for people; an error that is no one's disk and no one's data stays as it is."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if not isinstance(cause, OSError | ShardError | KeysError):
        return error
    return ShardError(f"{name}: {cause}. What is finished in {folder} stays; the same command continues")
