"""Runs an item: prepares shards, trains the start and every run, scores them, and writes the results after each.

A run is named by its settings and by the bytes of what it reads, not by its folder: scores of other settings, shards,
encoders, judged pairs or SentEval files are never shown, and their folders are refused.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from declutr.common.cluster import SessionConfig
from declutr.common.config import flat_keys
from declutr.common.errors import CheckpointError, TrainingFailedError, UsageError
from declutr.common.lock import RunLock
from declutr.common.paths import expand
from declutr.common.relay import CALLER
from declutr.common.storage import hash_file, hash_json, read_json, write_json, write_text
from declutr.common.stores.address import is_remote
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.checking import inspect
from declutr.evaluation.senteval.data.tasks import STS, TRANSFER, find
from declutr.evaluation.senteval.runner.harness import Evaluated, evaluate
from declutr.evaluation.senteval.runner.plan import VERSIONS, ScoringChoice
from declutr.evaluation.senteval.scores.results import Protocol, dev_headline, headline
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys
from declutr.pipeline.shards.manifest import MANIFEST, data_hash, load_manifest
from declutr.reproduction.item import Column, ItemPlan, PlannedRun
from declutr.reproduction.provenance import lasting_facts
from declutr.reproduction.table import write_results
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, find_latest, steps_in
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.driver.checks import changes
from declutr.trainer.driver.run import run_training
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.metrics.judged_pairs import FILES
from declutr.trainer.setup.config import TrainConfig

Say = Callable[[str], None]
_ABSENT = "not on this machine"
"""Content of what cannot be read here: an encoder at the hub, shards in a store or not yet prepared."""
_HOUR_SECONDS = 3600.0


def made_from(config: TrainConfig) -> dict[str, Any]:
    """What decides a run: settings by dotted key, and contents (hashes) of the shards, encoders and pairs it reads.

    Raises:
        UsageError: a file cannot be read.
    """
    validation, best = config.validation, config.export == "best"
    values = flat_keys(config.resume_settings())
    for name, task in config.tasks().items():
        values[f"auxiliary_tasks.{name}.data (content)" if name else "data (content)"] = [
            *map(_shards_content, task.places)
        ]
    encoders = {"encoder": config.encoder.pretrained}
    encoders |= {f"auxiliary_tasks.{name}": task.frontend.pretrained for name, task in config.auxiliary_tasks.items()}
    values |= {f"{key}.pretrained (content)": encoder_content(place) for key, place in encoders.items() if place}
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


def _record(config: TrainConfig) -> Path:
    """File beside a run's folder with what `made_from` returned before it was trained."""
    return Path(f"{config.run}.made_from.json")


def run_ready(config: TrainConfig) -> bool:
    """True if a run, or the start, has finished. What is not on this machine now is not compared.

    Raises:
        UsageError: its folder has a run of other settings or data.
    """
    run, now = Path(config.run), made_from(config)
    if _record(config).is_file():
        before = read_json(_record(config))
        absent = {
            key: before[key] for key, value in now.items() if _ABSENT in (value, *_listed(value)) and key in before
        }
        if changed := changes(before, now | absent):
            raise UsageError(
                f"{run}: was trained with other settings or data ({'; '.join(changed)}); delete it, or name another "
                "--work"
            )
    elif steps_in(run / CHECKPOINTS) or (run / SUMMARY).is_file():
        raise UsageError(f"{run}: has a run, and no {_record(config).name} beside it; name another --work")
    return (run / SUMMARY).is_file()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
        others = ", ".join(differing_keys(config, manifest.config))
        raise UsageError(f"{config.output}: was prepared with other settings ({others}); name another --work")
    return True


def classifier(plan: ItemPlan) -> ClassifierConfig:
    """Settings of the classifiers."""
    official = plan.settings.preset == "official"
    return ClassifierConfig.official() if official else ClassifierConfig.prototyping()


def identity(plan: ItemPlan, run: PlannedRun) -> str:
    """Hash of what decides the scores of a run, beside the data of its tasks."""
    encoder = run.cell.encoder
    made = made_from(run.config) if run.config else None
    scored = [encoder.model_dump(mode="json"), encoder_content(encoder.name)] if encoder else None
    columns = {name: column.model_dump(mode="json") for name, column in plan.columns.items()}
    return hash_json([made, scored, columns, classifier(plan).model_dump(mode="json"), dict(VERSIONS)])


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


def plan_lines(plan: ItemPlan) -> list[str]:
    """The plan as text.

    Raises:
        UsageError: a folder has shards or a run of other settings or data.
    """
    for run in plan.runs:
        if run.config is not None:
            run_ready(run.config)
    cells, seeds = list({run.cell.name: run for run in plan.runs}.values()), sorted({run.seed for run in plan.runs})
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
    width = max(len(run.cell.name) for run in cells)
    lines += [f"  {run.cell.name:<{width}}  {_work(run)}" for run in cells]
    trained = [record["seconds"] for run, record in done if run.config] or [record["seconds"] for _, record in done]
    hours = median(trained) / _HOUR_SECONDS if trained else plan.settings.hours
    left = len(plan.runs) - len(done)
    return [*lines, f"  time       {left} runs left: " + (f"{left * hours:.1f} hours" if hours else "unknown until one "
            "has finished")]  # fmt: skip


def _exists(path: str) -> bool:
    """False if a path, which may have wildcards, certainly does not exist."""
    fixed = re.split(r"[*?\[]", path)[0]
    return is_remote(path) or (expand(path).exists() if fixed == path else expand(fixed).parent.exists())


def _work(run: PlannedRun) -> str:
    """Steps and rows of a run."""
    config = run.config
    if config is None:
        return f"{run.cell.encoder.name}, scored as it is" if run.cell.encoder else ""
    share = "" if config.data_fraction == 1 else f" of {config.data_fraction:.0%}"
    if config.steps is not None:
        rows = config.steps * config.batch_documents
        return f"{config.steps:,} steps x {config.batch_documents} rows = {rows:,}{share}"
    return (
        f"{config.epochs or 1.0:g} pass(es){share} over {' and '.join(config.places)}, {config.batch_documents} a step"
    )


def reproduce(
    plan: ItemPlan, work: Path, senteval: Path, allow_unchecked: bool, command: Sequence[str], say: Say
) -> str:
    """Runs the unfinished part of an item; returns the results as Markdown.

    Each run is an ordinary run folder. A killed call continues where its checkpoints are. What one run lacks, such as
    shards whose corpus is missing, stops no other run.

    Args:
        plan: the item.
        work: folder of shards, start and results. One command at a time prepares them or works on an item.
        senteval: folder in SentEval's layout.
        allow_unchecked: score data other than the published ones.
        command: arguments of the command, for the results.
        say: receives progress lines.

    Raises:
        UsageError: the start cannot be trained or nothing can be scored; or runs failed, after all others have
            finished.
        RunLockedError: another command works in the folder.
        RunStoppedError: this process received a signal; the same command continues.
        TrainingFailedError: the start cannot be trained.
        ConfigError: settings of a run do not fit its shards.
    """
    scorer = Scorer(plan, senteval, allow_unchecked, say)
    plan.folder.mkdir(parents=True, exist_ok=True)
    lacking, failed = dict[str, str](), dict[str, str]()
    with RunLock(work, lambda: say(f"{work}: another command has taken over")):  # items share shards and start
        for name, shards in plan.shards.items():
            if not shards_ready(shards):
                say(f"preparing shards {name}")
                if problem := _prepare(name, shards, work):
                    lacking[shards.output] = problem
                    say(f"failed: {problem}")
            if plan.start is not None and shards.output in plan.start.places:  # later shards may use its tokenizer
                if shards.output in lacking:
                    raise UsageError(f"the start cannot be trained: {lacking[shards.output]}")
                _train(plan.start, say)
        if plan.start is not None:
            _train(plan.start, say)
    with RunLock(plan.folder, lambda: say(f"{plan.folder}: another command has taken over")):
        for number, run in enumerate(plan.runs, 1):
            if scores_of(plan, run, scorer.data) is None:
                name = f"{run.cell.name}, seed {run.seed}"
                say(f"run {number} of {len(plan.runs)}: {name}")
                places = [place for task in run.config.tasks().values() for place in task.places] if run.config else []
                try:
                    if problem := next((lacking[place] for place in places if place in lacking), None):
                        raise TrainingFailedError(problem)
                    _finish(plan, run, scorer, say)
                except (TrainingFailedError, CheckpointError) as error:  # such as a loss that is not finite: a result
                    failed[name] = reason = str(error).splitlines()[0]
                    say(f"failed: {name}: {reason}")
                write_results(plan, scores_by_run(plan, scorer.data), command, failed)
        text = write_results(plan, scores_by_run(plan, scorer.data), command, failed)
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UsageError(f"{len(failed)} of {len(plan.runs)} runs failed, the others are scored: {reasons}")
    return text


def scores_by_run(plan: ItemPlan, data: str) -> list[tuple[PlannedRun, dict[str, Any] | None]]:
    """Each run with its scores of these settings and data, None without any."""
    return [(run, scores_of(plan, run, data)) for run in plan.runs]


def _prepare(name: str, config: PipelineConfig, work: Path) -> str | None:
    """Prepares shards in a separate process, whose Ray session ends with it, and which is killed with this one.

    Returns the reason if it failed.
    """
    settings, log = work / f"prepare-{name}.yaml", work / f"prepare-{name}.log"
    values = config.model_dump(mode="json", exclude_unset=True)
    write_text(settings, yaml.safe_dump({"prepare": values}, sort_keys=False))
    words = [sys.executable, "-m", "declutr.cli.main", "prepare", str(settings)]
    with log.open("a") as output:
        done = subprocess.run(words, env=os.environ | {CALLER: str(os.getpid())}, stdout=output, stderr=output)
    if not done.returncode:
        return None
    return f"shards {name}: declutr prepare {settings} ended with status {done.returncode}; see {log}"


def _train(config: TrainConfig, say: Say) -> float:
    """Trains a run, or the start, to its end; returns the seconds of all its commands."""
    if not run_ready(config):
        say(f"training {config.run}")
        write_json(_record(config), made_from(config))
    return float(run_training(config)["seconds"])


def _finish(plan: ItemPlan, run: PlannedRun, scorer: "Scorer", say: Say) -> None:
    """Trains a run to its end and scores it."""
    seconds, trained = 0.0, list[dict[str, Any]]()
    if run.config is not None:
        run.folder.mkdir(parents=True, exist_ok=True)
        facts = run.folder / "trained_by.json"  # of all processes that trained the run
        trained = read_json(facts) if facts.is_file() else []
        if not run_ready(run.config) and (now := lasting_facts()) not in trained:
            trained.append(now)
            write_json(facts, trained)
        seconds = _train(run.config, say)
    began = time.monotonic()
    scores, warnings = scorer.score(run)
    seconds = round(seconds + time.monotonic() - began, 1)
    record: dict[str, Any] = {
        "identity": identity(plan, run),
        "data": scorer.data,
        "marks": scorer.marks,
        "scores": scores,
    }
    record |= {"warnings": warnings, "seconds": seconds, "made": lasting_facts(), "trained": trained}
    write_json(run.folder / "scores.json", record)


class Scorer:
    """Scores runs of an item on SentEval's tasks.

    Args:
        plan: the item.
        folder: folder in SentEval's layout.
        allow_unchecked: score data other than the published ones.
        say: receives progress lines.

    Raises:
        UsageError: a task has no usable data.
    """

    def __init__(self, plan: ItemPlan, folder: Path, allow_unchecked: bool, say: Say) -> None:
        if not plan.columns:
            raise UsageError(f"nothing can be scored: {'; '.join(plan.unscored.values())}; name --senteval")
        tasks = tuple(dict.fromkeys(task for column in plan.columns.values() for task in column.names))
        self._plan, self._say = plan, say
        self._tasks = [inspect(find(task), folder, allow_unchecked) for task in tasks]
        if unusable := [task for task in self._tasks if not task.usable]:
            reasons = "; ".join(f"{task.task.label}: {task.reason}" for task in unusable)
            remedy = "" if allow_unchecked else "; --allow-unchecked scores other data than the published ones"
            raise UsageError(f"{len(unusable)} of {len(tasks)} tasks cannot be scored in {folder} ({reasons}){remedy}")
        used = {_protocol(task, column) for column in plan.columns.values() for task in column.names
                if not _by_subset(task)}  # fmt: skip
        self._choice = ScoringChoice(
            tasks=tasks, protocols=tuple(sorted(used)) or ("senteval",), classifier=classifier(plan), geometry=False
        )
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
        numbers = {
            name: fmean(number_of(task, column, evaluated[column.checkpoint]) for task in column.names)
            for name, column in columns.items()
            if column.tasks
        }
        numbers |= {
            name: fmean(numbers[other] for other in column.mean_of)
            for name, column in columns.items()
            if column.mean_of
        }
        of_data = {finding for task in self._tasks for finding in task.findings}  # the same for all encoders
        warnings = dict[str, None]()
        for scored in evaluated.values():
            warnings |= dict.fromkeys(scored.warnings)
            for result in (result for report in scored.reports.values() for result in report.results.values()):
                label = find(result.task).label
                warnings |= {f"{label}: {line}": None for line in result.warnings if line not in of_data}
        return {name: numbers[name] for name in columns}, list(warnings)

    def _evaluate(self, run: PlannedRun, checkpoint: str) -> Evaluated:
        encoder = run.cell.encoder
        name, pooling = (encoder.name, encoder.pooling) if encoder else (str(run.folder / "run"), None)
        if encoder is None and checkpoint == "last":
            if (last := find_latest(run.folder / "run" / CHECKPOINTS)) is None:
                raise UsageError(f"{name}: no checkpoint is left; delete the folder, and the command trains again")
            name = str(last[0])
        configs = [other.config for other in self._plan.runs if other.config]
        local = bool(configs) and all(config.scaling.local for config in configs)  # all in this process, without Ray
        model = load_encoder(name, pooling, tokenized=True, device="cpu" if local else None)
        columns = [column for column in self._plan.columns.values() if column.checkpoint == checkpoint]
        tasks = [task for task in self._tasks if any(task.task.name in column.names for column in columns)]
        session = SessionConfig(num_cpus=1 if local else None)
        return evaluate(model, tasks, self._choice, run.folder / "senteval", session, self._say)


def number_of(task: str, column: Column, evaluated: Evaluated) -> float:
    """The number of a task, in percent.

    Raises:
        UsageError: it is missing.
    """
    protocol = next(iter(evaluated.reports)) if _by_subset(task) else _protocol(task, column)
    report = evaluated.reports[protocol]
    if task not in report.results:
        raise UsageError(f"{evaluated.encoder}: no score on {task}: {report.missing.get(task, 'unknown')}")
    scores = report.results[task].scores
    if _by_subset(task):
        return 100 * scores[f"spearman.{column.number.replace('all_dev', 'all').replace('dev', 'mean')}"]
    if column.number in ("dev", "all_dev"):
        return dev_headline(task, scores)
    return headline(task, scores, protocol)


def _by_subset(task: str) -> bool:
    """True for STS12-16, which every protocol scores in all ways."""
    return find(task).procedure == "similarity"


def _protocol(task: str, column: Column) -> Protocol:
    """The protocol that has the number of a task."""
    return "simcse" if column.number.startswith("all") and task in (*STS, *TRANSFER) else "senteval"
