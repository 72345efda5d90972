"""A table or figure of a paper as a file: what it varies, what is scored, and what was printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from declutr.common.config import Strict, describe
from declutr.common.suggestions import suggest
from declutr.common.yamlfile import YamlError, read_yaml_file
from declutr.encoders.protocol import Pooling
from declutr.evaluation.senteval.data.tasks import UnknownTaskError
from declutr.evaluation.senteval.runner.plan import choose_tasks

ITEMS = Path(__file__).resolve().parent.parent / "configs" / "reproduce"
"""Folder of the items."""
ScaleName = Literal["paper", "tiny"]
DATA, SENTEVAL, WORK, START = "DECLUTR_DATA", "DECLUTR_SENTEVAL", "DECLUTR_WORK", "DECLUTR_START"
"""Variables that the files of items name: the folder with all input data, SentEval's data, the working folder, and the
encoder to start from."""
Settings = dict[str, Any]
"""Values by dotted key."""


class ReproduceError(ValueError):
    """An item that cannot be reproduced: one sentence."""


class Column(Strict):
    """A number of each run: the mean over tasks, a score of the run's validation, or the mean of other columns."""

    tasks: tuple[str, ...] = ()
    """Tasks of SentEval, or sets of them."""
    number: Literal["mean", "wmean", "all", "dev", "all_dev"] = "mean"
    """Number of a task. mean: as DeCLUTR prints it, with the mean of the subsets for STS12-16. wmean: the same with
    their mean weighted by pairs. all: as SimCSE prints it, by cosine over all pairs, MRPC by accuracy. dev, all_dev: as
    mean and all, on development data; STS12-16, which have none, on test."""
    validation: str | None = None
    """Score of the run's last validation, in place of tasks. A score of rows is that of the half that chooses
    checkpoints; `reported_NAME` is that of the other half, of the score by which the run chooses."""
    mean_of: tuple[str, ...] = ()
    """Other columns, in place of tasks."""
    checkpoint: Literal["exported", "last"] = "exported"
    """Encoder that the tasks score. exported: the one that the run chooses by its setting `export`."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Column":
        if sum(map(bool, (self.tasks, self.validation, self.mean_of))) != 1:
            raise ValueError("give one of tasks, validation and mean_of")
        try:
            choose_tasks(self.tasks)
        except UnknownTaskError as error:
            raise ValueError(f"tasks: {error}") from error
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, without sets."""
        return choose_tasks(self.tasks)


class Prepared(Strict):
    """Something that runs need before they start."""

    config: str
    """File with the section of its command."""
    settings: Settings = Field(default_factory=dict)


class Scale(Strict):
    """One size in which an item can be run."""

    config: str = ""
    """File with the `train` section of all runs; empty if nothing is trained."""
    settings: Settings = Field(default_factory=dict)
    """Changes for all runs."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    axes: dict[str, dict[str, Settings]] = Field(default_factory=dict)
    """Changes of this scale by axis and label, added to those of the item. An axis that is listed has these labels
    alone."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """Columns of this scale in place of the item's."""
    shards: dict[str, Prepared] = Field(default_factory=dict)
    """Shards by name. They are prepared in $DECLUTR_WORK/shards, in this order, unless that folder has them."""
    start: Prepared | None = None
    """Run whose export, in $DECLUTR_WORK/start/export, the runs continue from."""
    preset: Literal["official", "prototyping"] = "official"
    """Settings of the classifiers."""
    hours: float | None = Field(default=None, gt=0)
    """Expected hours of a run, before one has finished."""


class KnownEncoder(Strict):
    """An encoder that is scored as it is."""

    name: str
    """As `declutr evaluate` takes it."""
    pooling: Pooling | None = None


class Item(Strict):
    """One table or figure."""

    title: str
    source: str
    """Paper, and number of the table or figure."""
    says: str
    """The paper's conclusion."""
    axes: dict[str, dict[str, Settings]] = Field(default_factory=dict)
    """Changes of settings by axis and label, of which `config` names another file. The runs are
    all combinations; the first label of an axis is the one to which the others are compared."""
    encoders: dict[str, KnownEncoder] = Field(default_factory=dict)
    """Encoders by label that are scored without training, in place of axes."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of labels of one axis to compare, the first one against the second, in place of each label with the
    axis' first one."""
    columns: dict[str, Column] = Field(min_length=1)
    printed: dict[str, dict[str, float]] = Field(default_factory=dict)
    """The paper's numbers by run, its labels joined by ", ", and column."""
    note: str = ""
    """Differences to the paper, and what its print leaves open."""
    scales: dict[ScaleName, Scale]

    @model_validator(mode="after")
    def _consistent(self) -> "Item":
        if bool(self.axes) == bool(self.encoders):
            raise ValueError("give axes or encoders, and not both")
        problems = []
        for name, scale in self.scales.items():
            if bool(scale.config) != bool(self.axes):
                problems.append(f"scales.{name}.config: runs need one, and encoders that are not trained have none")
            problems += [
                f"scales.{name}.axes.{axis}: no axis of the item{suggest(axis, list(self.axes))}"
                for axis in scale.axes
                if axis not in self.axes
            ]
            columns = scale.columns or self.columns
            problems += [
                f"columns.{column}.mean_of: {other} is no column{suggest(other, list(columns))}"
                for column, one in columns.items()
                for other in one.mean_of
                if other not in columns or columns[other].mean_of
            ]
        axes = {label: axis for axis, labels in self.axes.items() for label in labels}
        for key in self.scales:
            problems += [line for line in _axis_problems(self._axes(key)) if line not in problems]
        problems += [
            f"pairs: {label} is no label of an axis{suggest(label, list(axes))}"
            for pair in self.pairs
            for label in pair
            if label not in axes
        ]
        problems += [
            f"pairs: {one} and {other} are labels of two axes, {axes[one]} and {axes[other]}"
            for one, other in self.pairs
            if {one, other} <= axes.keys() and axes[one] != axes[other]
        ]
        known = {cell.name for cell in _combined(self.axes)} | {*self.encoders}
        problems += [
            f"printed.{name}: no run of the item{suggest(name, list(known))}"
            for name in self.printed
            if name not in known
        ]
        problems += [
            f"printed.{name}.{column}: no column{suggest(column, list(self.columns))}"
            for name, numbers in self.printed.items()
            for column in numbers
            if column not in self.columns
        ]
        problems += [
            f"{key} cannot be granted by a file; if you trust the code of that model, add it to the command"
            for key in _granted(self.model_dump())
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def cells(self, scale: ScaleName) -> list["Cell"]:
        """The encoders; or the start of a scale's runs, then the combinations of labels, the last axis fastest.

        The plan sets the pooling of the start.
        """
        if self.encoders:
            return [Cell({"encoder": label}, {}, encoder) for label, encoder in self.encoders.items()]
        start = [Cell({}, {}, KnownEncoder(name=f"${START}"))] if self.scales[scale].start else []
        return [*start, *_combined(self._axes(scale))]

    def _axes(self, scale: ScaleName) -> dict[str, dict[str, Settings]]:
        """The axes with the scale's changes."""
        own = self.scales[scale].axes
        return {
            axis: {label: labels.get(label, {}) | own[axis][label] for label in own[axis]} if axis in own else labels
            for axis, labels in self.axes.items()
        }


@dataclass(frozen=True)
class Cell:
    """One combination of labels: a run for each seed.

    Attributes:
        labels: label by axis; none of the encoder that the runs start from.
        settings: its changes of settings.
        encoder: encoder that is scored as it is, or None.
    """

    labels: Mapping[str, str]
    settings: Settings
    encoder: KnownEncoder | None = None

    @property
    def name(self) -> str:
        """The labels, joined; "start" without any."""
        return ", ".join(self.labels.values()) or "start"


def overlap(key: str, other: str) -> bool:
    """True if one of two dotted keys is the other or inside it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _axis_problems(axes: Mapping[str, Mapping[str, Settings]]) -> list[str]:
    """Problems of axes without labels, or that share a label or a setting."""
    problems = [f"axes.{axis}: has no label" for axis, labels in axes.items() if not labels]
    for (axis, labels), (other, others) in combinations(axes.items(), 2):
        problems += [
            f"axes.{other}.{label}: the axis {axis} has this label, too" for label in others if label in labels
        ]
        keys = dict.fromkeys(key for settings in labels.values() for key in settings)
        problems += [
            f"axes.{other}.{label}.{key}: the axis {axis} changes {mine}"
            for label, settings in others.items()
            for key in settings
            for mine in keys
            if overlap(key, mine)
        ]
    return problems


def _combined(axes: Mapping[str, Mapping[str, Settings]]) -> list[Cell]:
    """The combinations of all labels, the last axis fastest."""
    made = []
    for chosen in product(*(labels.items() for labels in axes.values())):
        settings: Settings = {}
        for _, changes in chosen:
            settings |= changes
        made.append(Cell(dict(zip(axes, (label for label, _ in chosen), strict=True)), settings))
    return made


def _granted(tree: Any, path: str = "") -> list[str]:
    """Dotted keys of every trust that the file would grant, because it may come from someone else."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else ():
        full = f"{path}.{key}" if path else str(key)
        own = str(key).rpartition(".")[2] == "trust_remote_code" and value is not False
        found += [full] if own else _granted(value, full)
    return found


def item_names() -> list[str]:
    """Names of the items that come with the project."""
    return sorted(path.stem for path in ITEMS.glob("*.yaml"))


def load_item(name: str) -> Item:
    """Reads an item.

    Args:
        name: of an item, or a path to a file with one.

    Raises:
        ReproduceError: there is no such item, or its file has a problem.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else ITEMS / f"{name}.yaml"
    if not path.is_file():
        known = item_names()
        raise ReproduceError(f"no item {name}{suggest(name, known)}; the items are {', '.join(known)}")
    try:
        return Item.model_validate(read_yaml_file(path))
    except YamlError as error:
        raise ReproduceError(f"{path} is not YAML that can be used: {error}") from error
    except ValidationError as error:
        raise ReproduceError(f"{path}: {'; '.join(describe(error, Item))}") from error
