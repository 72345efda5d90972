"""Runs an item: prepares shards, trains the start and every run, scores them, and writes the results after each."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from declutr.common.cluster import SessionConfig
from declutr.common.errors import CheckpointError, ConfigError, ShardError, TrainingFailedError, UsageError
from declutr.common.lock import RunLock
from declutr.common.paths import expand
from declutr.common.storage import hash_json, read_json, write_json
from declutr.common.stores.address import is_remote
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.harness import Evaluated, ScoringChoice, evaluate
from declutr.evaluation.senteval.scores import Protocol
from declutr.evaluation.senteval.tasks import STS, TRANSFER, find
from declutr.pipeline.config import PipelineConfig
from declutr.reproduction.identity import identity, made_from, record_of, run_ready, scores_of, shards_ready
from declutr.reproduction.item import Column
from declutr.reproduction.plan import ItemPlan, PlannedRun
from declutr.reproduction.provenance import lasting_facts
from declutr.reproduction.table import write_results
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, find_latest
from declutr.trainer.driver.run import run_training
from declutr.trainer.setup.config import TrainConfig

_HOUR_SECONDS = 3600.0
_FAILURES = (ConfigError, ShardError, TrainingFailedError, CheckpointError)
"""Ends of a run that stop no other one, such as a loss that is not finite."""


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def plan_lines(plan: ItemPlan) -> list[str]:
    """The plan as text.

    Raises:
        UsageError: a folder has shards or a run of other settings or data.
    """
    for run in plan.runs:
        if run.config is not None:
            run_ready(run.config)
    cells, seeds = {run.cell: run for run in plan.runs}, sorted({run.seed for run in plan.runs})
    done = [(run, record) for run in plan.runs if (record := scores_of(plan, run))]
    lines = [
        f"{plan.item.title} ({plan.item.source}), scale {plan.scale}",
        f"  runs       {len(cells)} cells x {len(seeds)} seed(s) {seeds}: {len(plan.runs)}, {len(done)} finished",
        f"  scores     {', '.join(plan.columns) or 'none'}",
        *(f"  missing    {heading}: {reason}" for heading, reason in plan.unscored.items()),
        f"  folder     {plan.folder}",
    ]
    for name, config in plan.shards.items():
        ready = shards_ready(config)
        lines.append(f"  shards     {name}: {'ready' if ready else f'to be prepared in {config.output}'}")
        if not ready and (absent := [path for path in getattr(config.corpus, "paths", ()) if not _exists(path)]):
            lines.append(f"  missing    {name}: {', '.join(absent)}; runs that read these shards cannot be trained")
    if plan.start is not None:
        lines.append(f"  start      {'ready' if run_ready(plan.start) else f'trained in {plan.start.steps} steps'}")
    width = max(map(len, cells))
    lines += [f"  {cell:<{width}}  {_work(run)}" for cell, run in cells.items()]
    seconds = [record["seconds"] for run, record in done if run.config] or [record["seconds"] for _, record in done]
    hours = median(seconds) / _HOUR_SECONDS if seconds else plan.settings.hours
    left = len(plan.runs) - len(done)
    time_left = f"{left * hours:.1f} hours" if hours else "unknown until one has finished"
    return [*lines, f"  time       {left} runs left: {time_left}"]


def _exists(path: str) -> bool:
    """False if a path, which may have wildcards, certainly does not exist."""
    fixed = re.split(r"[*?\[]", path)[0]
    return is_remote(path) or (expand(path).exists() if fixed == path else expand(fixed).parent.exists())


def _work(run: PlannedRun) -> str:
    """Steps and rows of a run."""
    config = run.config
    if config is None:
        return f"{run.encoder.name}, scored as it is" if run.encoder else ""
    share = "" if config.data_fraction == 1 else f" of {config.data_fraction:.0%}"
    if config.steps is not None:
        rows = config.steps * config.batch_documents
        return f"{config.steps:,} steps x {config.batch_documents} rows = {rows:,}{share}"
    return (
        f"{config.epochs or 1.0:g} pass(es){share} over {' and '.join(config.places)}, {config.batch_documents} a step"
    )


def reproduce(plan: ItemPlan, allow_unchecked: bool, command: Sequence[str]) -> str:
    """Runs the unfinished part of an item; returns the results as Markdown.

    Each run is an ordinary run folder. A killed call continues where its checkpoints are. What one run lacks, such as
    shards whose corpus is missing, stops no other run.

    Args:
        plan: the item.
        allow_unchecked: score data other than the published ones.
        command: arguments of the command, for the results.

    Raises:
        UsageError: nothing can be scored; or runs failed, after all others have finished.
        RunLockedError: another command works in the folder.
        RunStoppedError: this process received a signal; the same command continues.
        TrainingFailedError: the start cannot be trained.
        ConfigError: settings of the start do not fit its shards.
    """
    scorer, failed = Scorer(plan, allow_unchecked), dict[str, str]()
    plan.folder.mkdir(parents=True, exist_ok=True)

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except _FAILURES as error:
            failed[name] = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error).splitlines()[0]
            _say(f"failed: {name}: {failed[name]}")

    with _locked(plan.work):  # items share shards and start
        for name, shards in plan.shards.items():
            if not shards_ready(shards):
                _say(f"preparing shards {name}")
                attempt(f"shards {name}", partial(_prepare, shards))
            if plan.start is not None and shards.output in plan.start.places:  # later shards may use its tokenizer
                _train(plan.start)
        if plan.start is not None:
            _train(plan.start)

    def write() -> str:
        return write_results(plan, [(run, scores_of(plan, run, scorer.data)) for run in plan.runs], command, failed)

    with _locked(plan.folder):
        for number, run in enumerate(plan.runs, 1):
            if scores_of(plan, run, scorer.data) is None:
                _say(f"run {number} of {len(plan.runs)}: {run.name}")
                attempt(run.name, partial(_finish, plan, run, scorer))
                write()
        text = write()
    if failed:
        runs = sum(run.name in failed for run in plan.runs)
        first = {reason: name for name, reason in reversed(failed.items())}  # all may lack the same
        reasons = "; ".join(f"{name}: {reason}" for reason, name in reversed(first.items()))
        raise UsageError(f"{runs} of {len(plan.runs)} runs failed, the others are scored: {reasons}")
    return text


def _locked(folder: Path) -> RunLock:
    return RunLock(folder, lambda: _say(f"{folder}: another command has taken over"))


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
        _say(f"training {config.run}")
        write_json(record_of(config), made_from(config))
    return float(run_training(config)["seconds"])


def _finish(plan: ItemPlan, run: PlannedRun, scorer: "Scorer") -> None:
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
    scores, warnings = scorer.score(run)
    record = {
        "identity": identity(plan, run),
        "data": scorer.data,
        "marks": scorer.marks,
        "scores": scores,
        "warnings": warnings,
        "seconds": round(seconds + time.monotonic() - began, 1),
        "made": lasting_facts(),
        "trained": trained,
    }
    write_json(run.folder / "scores.json", record)


class Scorer:
    """Scores runs of an item on SentEval's tasks.

    Args:
        plan: the item.
        allow_unchecked: score data other than the published ones.

    Raises:
        UsageError: a task has no usable data.
    """

    def __init__(self, plan: ItemPlan, allow_unchecked: bool) -> None:
        if not plan.columns:
            raise UsageError(f"nothing can be scored: {'; '.join(plan.unscored.values())}; name --senteval")
        self._plan, folder = plan, plan.senteval
        scored = [(task, column) for column in plan.columns.values() for task in column.names]
        tasks = tuple(dict.fromkeys(task for task, _ in scored))
        self._tasks = [inspect(find(task), folder, allow_unchecked) for task in tasks]
        if unusable := [task for task in self._tasks if not task.usable]:
            reasons = "; ".join(f"{task.task.label}: {task.reason}" for task in unusable)
            remedy = "" if allow_unchecked else "; --allow-unchecked scores other data than the published ones"
            raise UsageError(f"{len(unusable)} of {len(tasks)} tasks cannot be scored in {folder} ({reasons}){remedy}")
        protocols = tuple(sorted({name for pair in scored if (name := _protocol(*pair))})) or ("senteval",)
        self._choice = ScoringChoice(tasks=tasks, protocols=protocols, classifier=plan.classifier, geometry=False)
        self.marks = [f"{task.task.label}: {task.standing}" for task in self._tasks if task.standing != "identical"]
        """Tasks whose data are not the published ones, with their standing."""
        files = {task.task.name: [task.standing, dict(task.data.files)] for task in self._tasks if task.data}
        self.data = hash_json(files)
        """Hash of the tasks' files."""

    def score(self, run: PlannedRun) -> tuple[dict[str, float], list[str]]:
        """The numbers of a finished run by column, and the warnings of their scoring.

        Raises:
            UsageError: a number is missing.
            EncoderError: the encoder cannot be loaded.
        """
        columns = self._plan.columns
        checkpoints = sorted({column.checkpoint for column in columns.values() if column.tasks})
        evaluated = {checkpoint: self._evaluate(run, checkpoint) for checkpoint in checkpoints}
        numbers = dict[str, float]()
        for name, column in sorted(columns.items(), key=lambda pair: bool(pair[1].mean_of)):  # of others: last
            of_tasks = (number_of(task, column, evaluated[column.checkpoint]) for task in column.names)
            numbers[name] = fmean((numbers[other] for other in column.mean_of) if column.mean_of else of_tasks)
        of_data = {finding for task in self._tasks for finding in task.findings}  # the same for all encoders
        warnings = dict[str, None]()
        for scored in evaluated.values():
            warnings |= dict.fromkeys(scored.warnings)
            for result in (result for report in scored.reports.values() for result in report.results.values()):
                label = find(result.task).label
                warnings |= {f"{label}: {line}": None for line in result.warnings if line not in of_data}
        return {name: numbers[name] for name in columns}, list(warnings)

    def _evaluate(self, run: PlannedRun, checkpoint: str) -> Evaluated:
        name, pooling = (run.encoder.name, run.encoder.pooling) if run.encoder else (str(run.folder / "run"), None)
        if run.config and checkpoint == "last":
            if (last := find_latest(run.folder / "run" / CHECKPOINTS)) is None:
                raise UsageError(f"{name}: no checkpoint is left; delete the folder, and the command trains again")
            name = str(last[0])
        configs = [other.config for other in self._plan.runs if other.config]
        local = bool(configs) and all(config.scaling.local for config in configs)  # all in this process, without Ray
        model = load_encoder(name, pooling, tokenized=True, device="cpu" if local else None)
        scored = {task for column in self._plan.columns.values() if column.checkpoint == checkpoint
                  for task in column.names}  # fmt: skip
        tasks = [task for task in self._tasks if task.task.name in scored]
        session = SessionConfig(num_cpus=1 if local else None)
        return evaluate(model, tasks, self._choice, run.folder / "senteval", session, _say)


def number_of(task: str, column: Column, evaluated: Evaluated) -> float:
    """The number of a task, in percent.

    Raises:
        UsageError: it is missing.
    """
    protocol = _protocol(task, column)
    report = next(iter(evaluated.reports.values())) if protocol is None else evaluated.reports[protocol]
    if task not in report.results:
        raise UsageError(f"{evaluated.encoder}: no score on {task}: {report.missing.get(task, 'unknown')}")
    result = report.results[task]
    if protocol is None:
        return 100 * result.scores[f"spearman.{column.number.replace('all_dev', 'all').replace('dev', 'mean')}"]
    return result.dev_headline if column.number in ("dev", "all_dev") else result.headline


def _protocol(task: str, column: Column) -> Protocol | None:
    """The protocol that has the number of a task; None for STS12-16, which every protocol scores in all ways."""
    if find(task).procedure == "similarity":
        return None
    return "simcse" if column.number.startswith("all") and task in (*STS, *TRANSFER) else "senteval"
