"""Scores of a run or an encoder: one number for each column of a table."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from declutr.common.cluster import SessionConfig
from declutr.common.storage import hash_json
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval.checks.checking import inspect
from declutr.evaluation.senteval.data.tasks import STS, TRANSFER, find
from declutr.evaluation.senteval.runner.harness import Evaluated, evaluate
from declutr.evaluation.senteval.runner.plan import ScoringChoice
from declutr.evaluation.senteval.scores.results import Protocol, dev_headline, headline
from declutr.reproduction.item import Column, ReproduceError
from declutr.reproduction.plan import ItemPlan, PlannedRun
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, find_latest
from declutr.trainer.driver.summary import first_and_last_scores

_WAYS = {"dev": "mean", "all_dev": "all"}


class Scorer:
    """Scores runs of an item on SentEval's tasks.

    Args:
        plan: the item.
        data: folder in SentEval's layout.
        allow_unchecked: score data other than the published ones.
        say: receives progress lines.

    Raises:
        ReproduceError: a task has no usable data.
    """

    def __init__(self, plan: ItemPlan, data: Path, allow_unchecked: bool, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._inspections = [inspect(find(task), data, allow_unchecked) for task in plan.tasks]
        if unusable := [one for one in self._inspections if not one.usable]:
            told = "; ".join(f"{one.task.label}: {one.reason}" for one in unusable)
            remedy = "" if allow_unchecked else "; --allow-unchecked scores other data than the published ones"
            raise ReproduceError(
                f"{len(unusable)} of {len(self._inspections)} tasks cannot be scored in {data} ({told}){remedy}"
            )
        protocols = {
            _protocol(task, column) for column in plan.columns.values() for task in column.names if not _by_subset(task)
        }
        self._choice = ScoringChoice(
            tasks=plan.tasks,
            protocols=tuple(sorted(protocols)) or ("senteval",),
            classifier=plan.classifier,
            geometry=False,
        )

    @property
    def marks(self) -> list[str]:
        """Tasks whose data are not the published ones, with their standing."""
        return [f"{one.task.label}: {one.standing}" for one in self._inspections if one.standing != "identical"]

    @property
    def data_identity(self) -> str:
        """Hash of the tasks' files."""
        return hash_json({one.task.name: [one.standing, dict(one.data.files)] for one in self._inspections if one.data})

    def score(self, run: PlannedRun) -> tuple[dict[str, float], list[str]]:
        """The numbers of a finished run by column, and the warnings of their scoring.

        An encoder that is scored as it is has no number of a validation.

        Raises:
            ReproduceError: a number is missing.
            EncoderError: the encoder cannot be loaded.
        """
        chosen = {column.checkpoint for column in self._plan.columns.values() if column.tasks}
        found = {checkpoint: self._evaluate(run, checkpoint) for checkpoint in sorted(chosen)}
        validated = first_and_last_scores(run.folder / "run")["last_scores"] if run.config else {}
        made: dict[str, float] = {}
        for name, column in self._plan.columns.items():
            if column.validation and run.config:
                if column.validation not in validated:
                    known = ", ".join(validated) or "none"
                    raise ReproduceError(f"column {name}: the run has no score {column.validation}; it has {known}")
                made[name] = validated[column.validation]
            elif column.tasks:
                made[name] = fmean(number_of(task, column, found[column.checkpoint]) for task in column.names)
        for name, column in self._plan.columns.items():
            if column.mean_of and made.keys() >= {*column.mean_of}:
                made[name] = fmean(made[one] for one in column.mean_of)
        warnings = dict.fromkeys(line for one in found.values() for line in self._warnings(one))
        return {name: made[name] for name in self._plan.columns if name in made}, list(warnings)

    def _warnings(self, found: Evaluated) -> list[str]:
        """Warnings about an encoder and its scores, without those about the data, which are the same for all."""
        data = {str(finding) for one in self._inspections for finding in one.findings}
        results = [one for report in found.reports.values() for one in report.results.values()]
        told = [f"{find(one.task).label}: {line}" for one in results for line in one.warnings if line not in data]
        return [*found.warnings, *told]

    def _evaluate(self, run: PlannedRun, checkpoint: str) -> Evaluated:
        known = run.cell.encoder
        name, pooling = (known.name, known.pooling) if known else (str(run.folder / "run"), None)
        if known is None and checkpoint == "last":
            last = find_latest(run.folder / "run" / CHECKPOINTS)
            if last is None:
                raise ReproduceError(f"{name}: no checkpoint is left; delete the folder, and the command trains again")
            name = str(last[0])
        configs = [one.config for one in self._plan.runs if one.config]
        local = bool(configs) and all(config.scaling.local for config in configs)  # all in this process, without Ray
        encoder = load_encoder(name, pooling, tokenized=True, device="cpu" if local else None)
        session = SessionConfig(num_cpus=1 if local else None)
        columns = [column for column in self._plan.columns.values() if column.checkpoint == checkpoint]
        needed = {task for column in columns for task in column.names}
        inspections = [one for one in self._inspections if one.task.name in needed]
        return evaluate(encoder, inspections, self._choice, run.folder / "senteval", session, self._say)


def number_of(task: str, column: Column, found: Evaluated) -> float:
    """The number of a task, in percent.

    Raises:
        ReproduceError: it is missing.
    """
    protocols = list(found.reports) if _by_subset(task) else [_protocol(task, column)]
    report = found.reports[protocols[0]]
    if task not in report.results:
        raise ReproduceError(f"{found.encoder}: no score on {task}: {report.missing.get(task, 'unknown')}")
    scores = report.results[task].scores
    if _by_subset(task):
        return 100 * scores[f"spearman.{_WAYS.get(column.number, column.number)}"]
    if column.number in ("dev", "all_dev"):
        return dev_headline(task, scores)
    return headline(task, scores, protocols[0])


def _by_subset(task: str) -> bool:
    """True for STS12-16, which every protocol scores in all ways."""
    return find(task).procedure == "similarity"


def _protocol(task: str, column: Column) -> Protocol:
    """The protocol that has the number of a task."""
    return "simcse" if column.number.startswith("all") and task in (*STS, *TRANSFER) else "senteval"
