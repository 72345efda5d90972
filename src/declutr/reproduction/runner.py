"""Runs an item: prepares shards, trains the start and every run, scores them, and writes the results after each."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from declutr.common.lock import RunLock
from declutr.common.relay import CALLER
from declutr.common.storage import read_json, write_json, write_text
from declutr.pipeline.config import PipelineConfig
from declutr.reproduction.item import ReproduceError
from declutr.reproduction.plan import ItemPlan, PlannedRun
from declutr.reproduction.provenance import lasting_facts
from declutr.reproduction.readiness import (
    MADE_FROM,
    TRAINED_BY,
    made_from,
    refuse_other,
    run_ready,
    shards_ready,
    start_ready,
)
from declutr.reproduction.results import write_results
from declutr.reproduction.scoring import Scorer
from declutr.trainer.checkpoints.checkpoint import CheckpointError
from declutr.trainer.driver.failure import TrainingFailedError
from declutr.trainer.driver.run import run_training
from declutr.trainer.setup.config import TrainConfig


def reproduce(
    plan: ItemPlan,
    work: Path,
    senteval: Path,
    allow_unchecked: bool,
    command: Sequence[str],
    say: Callable[[str], None],
) -> str:
    """Runs the unfinished part of an item; returns the results as Markdown.

    Each run is an ordinary run folder. A killed call continues where its checkpoints are.

    Args:
        plan: the item.
        work: folder of shards, start and results. One command at a time prepares them or works on an item.
        senteval: folder in SentEval's layout.
        allow_unchecked: score data other than the published ones.
        command: arguments of the command, for the results.
        say: receives progress lines.

    Raises:
        ReproduceError: something cannot be prepared or scored; or runs failed, after all others have finished.
        RunLockedError: another command works in the folder.
        RunStoppedError: this process received a signal; the same command continues.
        TrainingFailedError: the start cannot be trained.
        ConfigError: settings of a run do not fit its shards.
    """
    scorer = Scorer(plan, senteval, allow_unchecked, say)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone(work, say):  # items share shards and start
        for name, shards in plan.shards.items():
            if not shards_ready(shards):
                say(f"preparing shards {name}")
                _prepare(name, shards, work)
            if plan.start is not None and plan.start.data == shards.output:  # later shards may use its tokenizer
                _train_start(plan.start, say)
        if plan.start is not None:
            _train_start(plan.start, say)
    with _alone(plan.folder, say):
        for run in plan.runs:
            if run.config is not None:
                refuse_other(run.folder, made_from(run.config))
        data, failed = scorer.data_identity, dict[str, str]()
        for number, run in enumerate(plan.runs, 1):
            if plan.finished(run, data) is None:
                say(f"run {number} of {len(plan.runs)}: {run.cell.name}, seed {run.seed}")
                try:
                    _finish(plan, run, scorer)
                except (
                    TrainingFailedError,
                    CheckpointError,
                ) as error:  # such as a loss that is not finite: a result of this cell
                    failed[f"{run.cell.name}, seed {run.seed}"] = reason = str(error).splitlines()[0]
                    say(f"failed: {run.cell.name}, seed {run.seed}: {reason}")
                write_results(plan, command, data, failed)
        text = write_results(plan, command, data, failed)
    if failed:
        told = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise ReproduceError(f"{len(failed)} of {len(plan.runs)} runs failed, the others are scored: {told}")
    return text


def _alone(folder: Path, say: Callable[[str], None]) -> RunLock:
    """Refuses another command in this folder."""
    return RunLock(folder, lambda: say(f"{folder}: another command has taken over"))


def _prepare(name: str, config: PipelineConfig, work: Path) -> None:
    """Prepares shards in a separate process, whose Ray session ends with it, and which is killed with this one.

    Raises:
        ReproduceError: the command failed.
    """
    settings, log = work / f"prepare-{name}.yaml", work / f"prepare-{name}.log"
    values = config.model_dump(mode="json", exclude_unset=True)
    write_text(settings, yaml.safe_dump({"prepare": values}, sort_keys=False))
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, "-m", "declutr.cli.main", "prepare", str(settings)],
            env=os.environ | {CALLER: str(os.getpid())},
            stdout=output,
            stderr=output,
        )
    if done.returncode:
        raise ReproduceError(
            f"shards {name}: declutr prepare {settings} ended with status {done.returncode}; see {log}"
        )


def _train_start(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Trains the start unless it has finished."""
    if not start_ready(config):
        say(f"training the start in {config.run}")
        run_training(config)


def _finish(plan: ItemPlan, run: PlannedRun, scorer: Scorer) -> None:
    """Trains a run to its end and scores it."""
    seconds, trained = 0.0, list[dict[str, Any]]()
    if run.config is not None:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.folder / MADE_FROM, made_from(run.config))
        trained = _trained_by(run.folder / TRAINED_BY, run_ready(run.config))
        seconds = run_training(run.config)["seconds"]
    began = time.monotonic()
    scores, warnings = scorer.score(run)
    seconds += time.monotonic() - began
    known: dict[str, Any] = {"identity": plan.identity(run), "data": scorer.data_identity, "marks": scorer.marks}
    known |= {"scores": scores, "warnings": warnings, "seconds": round(seconds, 1)}
    known |= {"made": lasting_facts(), "trained": trained}
    write_json(run.scores, known)


def _trained_by(path: Path, finished: bool) -> list[dict[str, Any]]:
    """Facts of all processes that trained a run, kept in a file; this one is the last unless the run has finished."""
    found: list[dict[str, Any]] = read_json(path) if path.is_file() else []
    if not finished and (now := lasting_facts()) not in found:
        found.append(now)
        write_json(path, found)
    return found
