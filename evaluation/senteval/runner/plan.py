"""What is to be computed for one encoder: units, each a task by one method, with an identity that a file carries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from common.config import Strict
from common.storage import hash_json, read_json
from evaluation.senteval.classifier.settings import ClassifierConfig
from evaluation.senteval.data.findings import Inspection
from evaluation.senteval.data.taskdata import TaskData
from evaluation.senteval.data.tasks import DOWNSTREAM, PROBING, STS, TASKS, TRANSFER, find
from evaluation.senteval.scores.results import Protocol
from evaluation.senteval.scores.scoring import Method, cost, method_for

_VERSION = 1
"""Of the procedures: another one makes stored scores void."""

SETS: Mapping[str, tuple[str, ...]] = {
    "all": tuple(task.name for task in TASKS),
    "downstream": DOWNSTREAM,
    "probing": PROBING,
    "sts": STS,
    "transfer": TRANSFER,
}


class Choice(Strict):
    """What is asked for."""

    tasks: tuple[str, ...] = SETS["all"]
    """Names of tasks, in the order of the tables."""
    protocols: tuple[Protocol, ...] = Field(("senteval",), min_length=1)
    """Which papers' numbers."""
    classifier: ClassifierConfig = ClassifierConfig()
    """How classifiers are fitted."""


class StoredUnit(Strict):
    """A unit's file."""

    identity: str
    """Of encoder, data, method and settings."""
    task: str
    method: Method
    scores: Mapping[str, float]
    """By name, see `results.py`; empty where there could be none."""
    warnings: tuple[str, ...] = ()
    """What stands beside the score."""
    failed: str = ""
    """Why there is no score."""
    seconds: float = Field(ge=0)
    """That the scoring took, without embedding."""


@dataclass(frozen=True)
class Unit:
    """One task by one method, for one encoder.

    Attributes:
        data: the task's.
        method: how it is scored.
        identity: of everything that decides the scores.
        path: of the unit's file.
        cost: how long it takes, relative to others.
    """

    data: TaskData
    method: Method
    identity: str
    path: Path
    cost: float

    @property
    def name(self) -> str:
        """For people: the task's label, and the method where it is not the task's own."""
        label = self.data.task.label
        return label if self.method == "procedure" else f"{label} ({self.method})"

    def stored(self) -> StoredUnit | None:
        """What an earlier call left, if it is of the same encoder, data and settings."""
        try:
            found = StoredUnit.model_validate(read_json(self.path))
        except (OSError, ValueError, ValidationError):
            return None  # none yet, or not a file of ours: it is computed (again)
        return found if found.identity == self.identity else None


def choose_tasks(words: Sequence[str]) -> tuple[str, ...]:
    """Tasks of names, labels and sets (all, downstream, probing, sts, transfer), in the order of the tables.

    Raises:
        UnknownTaskError: a name that is none of these.
    """
    chosen = {name for word in words for name in SETS.get(word.lower()) or (find(word, SETS).name,)}
    return tuple(task.name for task in TASKS if task.name in chosen)


def methods(task_name: str, protocols: Sequence[Protocol]) -> tuple[Method, ...]:
    """How a task is scored for these protocols; STS-B also shows alignment and uniformity."""
    task = find(task_name)
    found: dict[Method, None] = {}
    for protocol in protocols:
        method = method_for(task, protocol)
        if method is not None:
            found[method] = None
    if found and task.name == "STSBenchmark":
        found["geometry"] = None
    return tuple(found)


def plan_units(inspections: Sequence[Inspection], choice: Choice, fingerprint: str, folder: Path) -> tuple[Unit, ...]:
    """Units of all usable tasks, the longest first.

    Args:
        inspections: of the chosen tasks.
        choice: what is asked for.
        fingerprint: of the encoder.
        folder: of the encoder's files.
    """
    units = []
    for inspection in inspections:
        data = inspection.data
        if not inspection.usable or data is None:
            continue
        for method in methods(inspection.task.name, choice.protocols):
            made_of: list[Any] = [_VERSION, fingerprint, inspection.task.name, method, dict(data.files)]
            made_of += [inspection.standing, choice.classifier.model_dump(mode="json")]
            end = "" if method == "procedure" else f".{method}"
            path = folder / f"{inspection.task.name}{end}.json"
            units.append(Unit(data, method, hash_json(made_of), path, cost(data, method, choice.classifier)))
    return tuple(sorted(units, key=lambda unit: -unit.cost))
