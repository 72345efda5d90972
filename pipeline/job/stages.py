"""The stages of a preparation on Ray Data; each stage skips finished units.

Without removal of duplicates, a single stage reads and writes the units. With it, the first stage writes candidates,
the second finds duplicates over all units, and the third writes the units without them.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import WorkerCrashedError

from declutr.common.console.logs import get_logger
from declutr.common.errors import ShardError
from declutr.common.session import start_ray
from declutr.common.storage import Files, decoded, encoded
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.job.output import Output
from declutr.pipeline.job.output_store import OutputStore, made_in, refuse_missing
from declutr.pipeline.job.progress import HEARTBEATS, Progress
from declutr.pipeline.job.sample import output_engine
from declutr.pipeline.job.selection import most_frequent_labels, write_selected
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.shards.manifest import Sidecar
from declutr.pipeline.tokenizer.batch_tokenizer import EngineName
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

_ATTEMPTS = 10
"""Retries of a unit whose worker died; limited, because an input that crashes a library does so every time."""
Stage = Literal["prepare", "select"]


def run_stages(output: Output, units: Sequence[Unit], tokenizer: TokenizerInfo | None) -> list[Sidecar]:
    """Completes the units of an output; returns their sidecars in plan order.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
        ShardError: a task could not read its input or write its output.
    """
    if not output.config.duplicates.enabled:
        return _run("prepare", output, units, tokenizer)
    if (output.folder / DUPLICATES).exists():
        # Once the duplicates are known, only units with missing files are read again.
        missing = [unit for unit in units if output.finished_sidecar(unit, "select") is None]
        _run("prepare", output, missing, tokenizer)
    else:
        candidates = _run("prepare", output, units, tokenizer)
        try:
            output.find_duplicates(
                [unit.name for unit in units], most_frequent_labels(candidates, output.config.content)
            )
        except (ShardError, OSError) as error:
            raise _stopped("duplicates", output.name, error) from error
    return _run("select", output, units, tokenizer)


def _run(stage: Stage, output: Output, units: Sequence[Unit], tokenizer: TokenizerInfo | None) -> list[Sidecar]:
    """Processes unfinished units on Ray Data; returns the sidecars of all units in order."""
    config, folder = output.config, output.folder
    before = [output.finished_sidecar(unit, stage) for unit in units]
    done = [sidecar for sidecar in before if sidecar]
    sidecars = {sidecar.unit: sidecar for sidecar in done}
    todo = [unit for unit, sidecar in zip(units, before, strict=True) if sidecar is None]
    todo.sort(key=lambda unit: (-unit.weight, unit.name))  # a large unit started last would keep one worker busy alone
    if done:
        get_logger().info("%s: %d of %d units are already finished", stage, len(done), len(units))
    if todo:
        engine = output_engine(config, folder, units) if stage == "prepare" else "tokenizers"
        start_ray(output.session.num_cpus, output.session.address)
        # One block a unit, so that a dead task is retried alone. The order of completion does not matter.
        items = [{"unit": unit.model_dump_json(), "needs": encoded(output.files_of(stage, unit.name))} for unit in todo]
        rows = ray.data.from_items(items, override_num_blocks=len(todo))
        arguments = {"stage": stage, "folder": str(folder), "config": config, "tokenizer": tokenizer, "engine": engine}
        if output.store is not None:
            arguments |= {"store": output.store, "shared": output.shared_files(stage)}
        results = rows.map(
            work_on, fn_kwargs=arguments, num_cpus=1, ray_remote_args_fn=lambda: {"max_retries": _ATTEMPTS}
        )
        with Progress(folder, stage, sum(unit.num_bytes for unit in units), done, config.content.kind) as progress:
            try:
                for row in results.iter_rows():
                    if row["problem"]:
                        raise _stopped(stage, output.name, row["problem"])
                    sidecar = Sidecar.model_validate_json(row["sidecar"])
                    if row["sent"]:
                        output.note(stage, sidecar.unit, decoded(row["sent"], sidecar.unit))
                    sidecars[sidecar.unit] = sidecar
                    progress.add(sidecar)
            except WorkerCrashedError as error:
                left = [unit for unit in todo if unit.name not in sidecars]
                names = ", ".join(f"{unit.name} ({unit.parts[0].source} ...)" for unit in left[:3])
                why = (
                    f"workers died {_ATTEMPTS + 1} times on one of the {len(left)} remaining units: {names}. Either "
                    "memory is short (lower session.num_cpus), or an input crashes a library"
                )
                raise _stopped(stage, output.name, why) from error
    return [sidecars[unit.name] for unit in units]


def work_on(
    row: dict[str, Any],
    stage: Stage,
    folder: str,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None,
    store: OutputStore | None = None,
    shared: Files | None = None,
) -> dict[str, Any]:
    """Processes one unit; Ray Data maps it from `{"unit": JSON}` to `{"sidecar": JSON, "problem": message}`.

    If the output is in a store, the unit's files are made in a temporary folder of this host, and sent; the row then
    has the list of the files that the task needs (`needs`), and the answer the list of those that it has sent (`sent`).

    A full disk or a damaged file is returned as a problem; raised here, users would see it as a traceback of Ray.
    """
    # Ray gives a task one CPU; the tokenizer's own threads would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit = Unit.model_validate_json(row["unit"])

    def write(place: Path) -> Sidecar:
        if stage == "prepare":
            return write_unit(unit, place, config, tokenizer, engine)
        return write_selected(unit, place, config, tokenizer)

    sent = b""
    try:
        if store is not None or config.session.address is not None:  # tasks may run on other hosts
            refuse_missing(unit)
        if store is None:
            sidecar = write(Path(folder))
        else:
            needs = decoded(row["needs"], unit.name)
            with store.staging_dir(shared or {}, needs, Path(folder) / HEARTBEATS) as place:
                sidecar = write(place)
                sent = encoded(store.send_finished(stage, unit.name, place, made_in(place, needs)))
    except (OSError, ShardError) as error:
        return {"sidecar": "", "problem": f"unit {unit.name}: {error}", "sent": b""}
    return {"sidecar": sidecar.model_dump_json(), "problem": "", "sent": sent}


def _stopped(stage: str, output: str, problem: object) -> ShardError:
    return ShardError(f"{stage}: {problem}. Finished work in {output} is kept; the same command continues")
