"""Scoring units of one encoder: one task scored by one method, with an identity stored in the unit's file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from declutr.common.config import Strict
from declutr.common.storage import hash_json, read_json
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.taskdata import Inspection, TaskData, without_train
from declutr.evaluation.senteval.data.tasks import (
    ALL_TASKS,
    DOWNSTREAM,
    PROBING,
    STS,
    STSB_MULTI,
    TASKS,
    TRANSFER,
    find,
)
from declutr.evaluation.senteval.scores.results import Protocol
from declutr.evaluation.senteval.scores.scoring import Method, cost, method_for

VERSIONS: Mapping[Method, int] = {"procedure": 1, "cosine": 2, "geometry": 1}
"""Version of each scoring method; a new version invalidates stored scores."""

SETS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(task.name for task in TASKS),
    "downstream": DOWNSTREAM,
    "probing": PROBING,
    "sts": STS,
    "transfer": TRANSFER,
    "stsb-multi": STSB_MULTI,
}
"""Sets of tasks by name; "all" has SentEval's 28."""


class ScoringChoice(Strict):
    """Requested evaluation."""

    tasks: tuple[str, ...] = SETS["all"]
    """Names of tasks, in the order of the tables."""
    protocols: tuple[Protocol, ...] = Field(("senteval",), min_length=1)
    """Protocols: the papers whose procedures are followed."""
    classifier: ClassifierConfig = ClassifierConfig()
    """Classifier settings."""
    geometry: bool = True
    """Compute alignment and uniformity, of all sentences of STS-B."""


class StoredUnit(Strict):
    """Content of a unit's file."""

    identity: str
    """Hash of encoder, data, method and settings."""
    task: str
    method: Method
    scores: Mapping[str, float]
    """Scores by name, see `results.py`; empty if the unit failed."""
    warnings: tuple[str, ...] = ()
    """Warnings shown next to the score."""
    failed: str = ""
    """Reason for a missing score; "" if scored."""
    seconds: float = Field(ge=0)
    """Scoring time, without embedding."""


@dataclass(frozen=True)
class ScoringUnit:
    """One task scored by one method, for one encoder."""

    data: TaskData
    method: Method
    identity: str
    """Hash of everything that decides the scores."""
    path: Path
    cost: float
    """Expected time, relative to other units."""

    @property
    def name(self) -> str:
        """Label for people: the task's label, plus the method unless it is the task's own procedure."""
        label = self.data.task.label
        return label if self.method == "procedure" else f"{label} ({self.method})"

    def stored(self) -> StoredUnit | None:
        """Result of an earlier call for the same encoder, data and settings, or None."""
        try:
            unit = StoredUnit.model_validate(read_json(self.path))
        except (OSError, ValueError, ValidationError):
            return None  # no file yet, or not a unit's file: compute the unit
        return unit if unit.identity == self.identity else None


def choose_tasks(words: Sequence[str]) -> tuple[str, ...]:
    """Resolve names, labels and sets (`SETS`) to tasks, in the order of the tables.

    Raises:
        UsageError: a name that matches no task and no set.
    """
    chosen = {name for word in words for name in SETS.get(word.lower()) or (find(word, SETS).name,)}
    return tuple(task.name for task in ALL_TASKS if task.name in chosen)


def methods(task_name: str, choice: ScoringChoice) -> tuple[Method, ...]:
    """Methods that score a task; STS-B also gets alignment and uniformity if they are chosen."""
    task = find(task_name)
    chosen = dict.fromkeys(method for protocol in choice.protocols if (method := method_for(task, protocol)))
    return (*chosen, "geometry") if choice.geometry and chosen and task.name == "STSBenchmark" else tuple(chosen)


def plan_units(
    inspections: Sequence[Inspection], choice: ScoringChoice, fingerprint: str, folder: Path
) -> tuple[ScoringUnit, ...]:
    """Plan the units of all usable tasks, longest first, for the encoder with this fingerprint and folder."""
    units = []
    for inspection in inspections:
        data = inspection.data
        if not inspection.usable or data is None:
            continue
        for method in methods(inspection.task.name, choice):
            made_of: list[Any] = [VERSIONS[method], fingerprint, inspection.task.name, method, dict(data.files)]
            made_of += [inspection.standing, choice.classifier.model_dump(mode="json")]
            end = "" if method == "procedure" else f".{method}"
            path = folder / f"{inspection.task.name}{end}.json"
            read = without_train(data) if method == "cosine" else data
            units.append(ScoringUnit(read, method, hash_json(made_of), path, cost(read, method, choice.classifier)))
    return tuple(sorted(units, key=lambda unit: -unit.cost))
