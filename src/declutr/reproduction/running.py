"""Runs an item: prepares shards, trains the start and every run, scores them, and writes the results after each."""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from declutr.common.errors import (
    CheckpointError,
    ConfigError,
    EncoderError,
    ShardError,
    TrainingFailedError,
    UsageError,
)
from declutr.common.lock import RunLock
from declutr.common.paths import expand
from declutr.common.storage import read_json, write_json
from declutr.common.stores.address import is_remote
from declutr.pipeline.config import PipelineConfig
from declutr.reproduction.plan import ItemPlan, PlannedRun, identity, run_ready, scores_of, shards_ready, write_record
from declutr.reproduction.provenance import lasting_facts
from declutr.reproduction.table import Scorer, say, write_results
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import load_problems, refuse, resolve
from declutr.trainer.train import run_training

_FAILURES = (ConfigError, ShardError, TrainingFailedError, CheckpointError, EncoderError)
"""Ends of a run that stop no other one, such as a loss that is not finite or an encoder that cannot be loaded."""


def plan_lines(plan: ItemPlan) -> list[str]:
    """The plan as text."""
    for training in filter(None, (run.config for run in plan.runs)):
        run_ready(training)
    cells, seeds = {run.cell: run for run in plan.runs}, sorted({run.seed for run in plan.runs})
    trained = [run for run in cells.values() if run.config] or cells  # or an item of encoders
    done = [(run, record) for run in plan.runs if (record := scores_of(plan, run))]
    lines = [
        f"{plan.item.title} ({plan.item.source}), scale {plan.scale}",
        f"  runs       {len(plan.runs)} ({len(trained)} cells, seeds {seeds}), {len(done)} finished",
        f"  scores     {', '.join(plan.columns) or 'none'}",
        *(f"  missing    {heading}: {reason}" for heading, reason in plan.unscored.items()),
        f"  folder     {plan.folder}",
    ]
    ready = {name: shards_ready(config) for name, config in plan.shards.items()}
    for name, config in plan.shards.items():
        lines.append(f"  shards     {name}: {'ready' if ready[name] else f'to be prepared in {config.output}'}")
        if not ready[name] and (absent := [path for path in getattr(config.corpus, "paths", ()) if not _exists(path)]):
            lines.append(f"  missing    {name}: {', '.join(absent)}; runs that read these shards cannot be trained")
    if plan.start is not None:
        lines.append(f"  start      {'ready' if run_ready(plan.start) else f'trained in {plan.start.steps} steps'}")
    width = max(map(len, cells))
    lines += [f"  {cell:<{width}}  {_work(run)}" for cell, run in cells.items()]
    # of trainings, because an encoder that is only scored takes far less
    seconds = [record["seconds"] for run, record in done if run.config] or [record["seconds"] for _, record in done]
    hours = median(seconds) / 3600 if seconds else plan.settings.hours
    left = len(plan.runs) - len(done)
    time_left = f"{left * hours:.1f} hours" if hours else "unknown until one has finished"
    if not all(ready.values()) or (plan.start is not None and not run_ready(plan.start)):
        time_left += f"; before them {(plan.start and plan.settings.hours_before) or 'an unknown number of'} hours"
    return [*lines, f"  time       {left} runs left: {time_left}"]


def _exists(path: str) -> bool:
    """False if a path, which may have wildcards, certainly does not exist."""
    fixed = re.split(r"[*?\[]", path)[0]  # the part before a wildcard
    return is_remote(path) or (expand(path).exists() if fixed == path else expand(fixed).parent.exists())


def _work(run: PlannedRun) -> str:
    """Steps and rows of a run."""
    config = run.config
    if config is None:
        return f"{run.encoder.name}, scored as it is" if run.encoder else ""
    share = "" if config.data_fraction == 1 else f" of {config.data_fraction:.0%}"
    if config.steps is None:
        passes = f"{config.epochs or 1.0:g} pass(es){share} over {' and '.join(config.places)}"
        return f"{passes}, {config.batch_documents} a step"
    return f"{config.steps:,} steps x {config.batch_documents} rows = {config.steps * config.batch_documents:,}{share}"


def reproduce(
    plan: ItemPlan,  # the item
    allow_unchecked: bool,  # score data other than the published ones
    command: Sequence[str],  # arguments of the command, for the results
) -> str:
    """Runs the unfinished part of an item; returns the results as Markdown.

    A killed call continues where its checkpoints are. What one run lacks, such as a corpus, stops no other run.
    """
    scorer, failed = Scorer(plan, allow_unchecked), dict[str, str]()  # refuses data before anything is trained
    plan.folder.mkdir(parents=True, exist_ok=True)

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except _FAILURES as error:
            failed[name] = _reason(error)
            say(f"failed: {name}: {failed[name]}")

    with _locked(plan.work):  # items share shards and start
        for name, shards in plan.shards.items():
            if not shards_ready(shards):
                say(f"preparing shards {name}")
                attempt(f"shards {name}", partial(_prepare, shards))
            if plan.start is not None and shards.output in plan.start.places:  # later shards may use its tokenizer
                _train(plan.start)
        if plan.start is not None:
            _train(plan.start)

    def write() -> str:
        return write_results(plan, [(run, scores_of(plan, run, scorer.data)) for run in plan.runs], command, failed)

    with _locked(plan.folder):
        left = {run.cell: run.config for run in plan.runs if run.config and scores_of(plan, run, scorer.data) is None}
        for cell, config in left.items():  # one seed of each, before any is trained: its turn may come after hours
            try:
                refuse(load_problems(resolve(config)))
            except (*_FAILURES, UsageError, OSError) as error:
                say(f"will fail: {cell}: {_reason(error)}")
        for number, run in enumerate(plan.runs, 1):
            if scores_of(plan, run, scorer.data) is None:
                say(f"run {number} of {len(plan.runs)}: {run.name}")
                attempt(run.name, partial(_finish, plan, run, scorer))
                write()  # a long call can be watched, and a killed one leaves its results
        text = write()
    if failed:
        runs = sum(run.name in failed for run in plan.runs)
        first = {reason: name for name, reason in reversed(failed.items())}  # all may lack the same
        reasons = "; ".join(f"{name}: {reason}" for reason, name in reversed(first.items()))
        raise UsageError(f"{runs} of {len(plan.runs)} runs failed, the others are scored: {reasons}")
    return text


def _reason(error: Exception) -> str:
    return "; ".join(error.problems) if isinstance(error, ConfigError) else str(error).splitlines()[0]


def _locked(folder: Path) -> RunLock:
    return RunLock(folder, lambda: say(f"{folder}: another command has taken over"))


def _prepare(config: PipelineConfig) -> None:
    import ray

    from declutr.pipeline.prepare import prepare

    try:
        prepare(config)
    finally:
        ray.shutdown()  # runs that train in this process need its memory and processors


def _train(config: TrainConfig) -> float:
    """Trains a run, or the start, to its end; returns the seconds of all its commands."""
    if not run_ready(config):
        say(f"training {config.run}")
        write_record(config)
    return float(run_training(config)["seconds"])


def _finish(plan: ItemPlan, run: PlannedRun, scorer: Scorer) -> None:
    """Trains a run to its end and scores it."""
    seconds, trained = 0.0, list[dict[str, Any]]()
    if run.config is not None:
        run.folder.mkdir(parents=True, exist_ok=True)
        facts = run.folder / "trained_by.json"  # of all processes that trained the run
        trained = read_json(facts) if facts.is_file() else []
        if not run_ready(run.config) and (now := lasting_facts()) not in trained:
            trained.append(now)
            write_json(facts, trained)
        seconds = _train(run.config)
    began = time.monotonic()
    scores, items, warnings = scorer.score(run)
    record = {
        "identity": identity(plan, run),
        "data": scorer.data,
        "marks": scorer.marks,
        "scores": scores,
        "items": items,
        "warnings": warnings,
        "seconds": round(seconds + time.monotonic() - began, 1),
        "made": lasting_facts(),
        "trained": trained,
    }
    write_json(run.folder / "scores.json", record)
