"""The stages of a preparation on Ray Data; each stage skips finished units.

Without removal of duplicates, a single stage reads and writes the units. With it, the first stage writes candidates,
the second finds duplicates over all units, and the third writes the units without them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import ray
from ray.exceptions import WorkerCrashedError

from common.console.logs import get_logger
from common.session import start_ray
from common.storage import fsync_path
from pipeline.config import PipelineConfig
from pipeline.duplicates.keys import KeysError
from pipeline.duplicates.search import find_duplicates
from pipeline.duplicates.table import DUPLICATES
from pipeline.job.progress import Progress
from pipeline.job.sample import output_engine
from pipeline.job.selection import write_selected
from pipeline.job.unit_writer import finished_sidecar
from pipeline.job.units import Unit
from pipeline.job.worker import stage_folder, write_unit
from pipeline.shards.content import noun_of
from pipeline.shards.manifest import ShardError, Sidecar
from pipeline.tokenizer.batch_tokenizer import EngineName
from pipeline.tokenizer.tokenization import TokenizerInfo

_ATTEMPTS = 10
"""Retries of a unit whose worker died; limited, because an input that crashes a library does so every time."""
Stage = Literal["prepare", "select"]


def run_stages(
    config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo | None
) -> list[Sidecar]:
    """Completes the output folder; returns the sidecars of all units in plan order.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
        ShardError: a task could not read its input or write its output.
    """
    if not config.duplicates.enabled:
        return _run("prepare", config, folder, units, tokenizer)
    if (folder / DUPLICATES).exists():
        # Once the duplicates are known, only units with missing files are read again.
        missing = [unit for unit in units if finished_sidecar(unit, folder, config) is None]
        _run("prepare", config, folder, missing, tokenizer)
    else:
        _run("prepare", config, folder, units, tokenizer)
        try:
            candidates = stage_folder(folder, config)
            found = find_duplicates(candidates, [unit.name for unit in units], config.duplicates, config.session)
        except (KeysError, OSError) as error:
            raise _stopped("duplicates", folder, error) from error
        found.replace(folder / DUPLICATES)
        fsync_path(folder)
    return _run("select", config, folder, units, tokenizer)


def _run(
    stage: Stage, config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo | None
) -> list[Sidecar]:
    """Processes unfinished units on Ray Data; returns the sidecars of all units in order."""
    target = stage_folder(folder, config) if stage == "prepare" else folder
    found = [finished_sidecar(unit, target, config) for unit in units]
    done = [sidecar for sidecar in found if sidecar]
    sidecars = {sidecar.unit: sidecar for sidecar in done}
    todo = [unit for unit, sidecar in zip(units, found, strict=True) if sidecar is None]
    todo.sort(key=lambda unit: (-unit.weight, unit.name))  # a large unit started last would keep one worker busy alone
    if done:
        get_logger().info("%s: %d of %d units are already finished", stage, len(done), len(units))
    if todo:
        engine = output_engine(config, folder, units) if stage == "prepare" else "tokenizers"
        start_ray(config.session.num_cpus, config.session.address)
        # One block a unit, so that a dead task is retried alone. The order of completion does not matter.
        rows = ray.data.from_items([{"unit": unit.model_dump_json()} for unit in todo], override_num_blocks=len(todo))
        arguments = {"stage": stage, "folder": str(folder), "config": config, "tokenizer": tokenizer, "engine": engine}
        results = rows.map(
            work_on, fn_kwargs=arguments, num_cpus=1, ray_remote_args_fn=lambda: {"max_retries": _ATTEMPTS}
        )
        with Progress(
            folder, stage, sum(unit.num_bytes for unit in units), done, noun_of(config.content.kind)
        ) as progress:
            try:
                for row in results.iter_rows():
                    if row["problem"]:
                        raise _stopped(stage, folder, row["problem"])
                    sidecar = Sidecar.model_validate_json(row["sidecar"])
                    sidecars[sidecar.unit] = sidecar
                    progress.add(sidecar)
            except WorkerCrashedError as error:
                left = [unit for unit in todo if unit.name not in sidecars]
                raise _stopped(stage, folder, _crashed(left)) from error
    return [sidecars[unit.name] for unit in units]


def work_on(
    row: dict[str, str],
    stage: Stage,
    folder: str,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None,
) -> dict[str, str]:
    """Processes one unit; Ray Data maps it from `{"unit": JSON}` to `{"sidecar": JSON, "problem": message}`.

    A full disk or a damaged file is returned as a problem; raised here, users would see it as a traceback of Ray.
    """
    # Ray gives a task one CPU; the tokenizer's own threads would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit = Unit.model_validate_json(row["unit"])
    try:
        if stage == "prepare":
            sidecar = write_unit(unit, Path(folder), config, tokenizer, engine)
        else:
            sidecar = write_selected(unit, Path(folder), config, tokenizer)
    except (OSError, ShardError) as error:
        return {"sidecar": "", "problem": f"unit {unit.name}: {error}"}
    return {"sidecar": sidecar.model_dump_json(), "problem": ""}


def _crashed(left: Sequence[Unit]) -> str:
    named = ", ".join(f"{unit.name} ({unit.parts[0].source} ...)" for unit in left[:3])
    return (
        f"workers died {_ATTEMPTS + 1} times on one of the {len(left)} remaining units: {named}. Either memory is "
        "short (lower session.num_cpus), or an input crashes a library"
    )


def _stopped(stage: str, folder: Path, problem: object) -> ShardError:
    return ShardError(f"{stage}: {problem}. Finished work in {folder} is kept; the same command continues")
