"""A table or figure of a paper as a file: what it varies, what is scored, what was printed."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from declutr.common.config import Strict, describe, flat_keys
from declutr.common.errors import UsageError, suggest
from declutr.common.yamlfile import YamlError, read_yaml_file
from declutr.encoders.protocol import Pooling
from declutr.evaluation.senteval.tasks import choose_tasks

ITEMS = Path(__file__).resolve().parent.parent / "configs" / "reproduce"  # folder of the items
# The encoder to start from. Items also write $DECLUTR_DATA, $DECLUTR_SENTEVAL and $DECLUTR_WORK (options' folders).
START = "$DECLUTR_START"
ScaleName = Literal["paper", "tiny"]
Settings = dict[str, Any]  # values by dotted key
Axes = Mapping[str, Mapping[str, Settings]]  # changes of settings by axis and label


class Column(Strict):
    """A number of each run: the mean over tasks, or over other columns."""

    tasks: tuple[str, ...] = ()  # tasks of SentEval, or sets of them
    # Number of a task. mean: as DeCLUTR prints it, with the mean of the subsets for STS12-16. wmean: the same with
    # their mean weighted by pairs. all: as SimCSE prints it, by cosine over all pairs, MRPC by accuracy. dev, all_dev:
    # as mean and all, on development data; STS12-16, which have none, on test.
    number: Literal["mean", "wmean", "all", "dev", "all_dev"] = "mean"
    mean_of: tuple[str, ...] = ()  # other columns, in place of tasks
    checkpoint: Literal["exported", "last"] = "exported"  # exported: what the run chooses by its setting `export`

    @model_validator(mode="after")
    def _has_one_source(self) -> "Column":
        if bool(self.tasks) == bool(self.mean_of):
            raise ValueError("give one of tasks and mean_of")
        choose_tasks(self.tasks)  # its error is one of the column
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, without sets."""
        return choose_tasks(self.tasks)


class Prepared(Strict):
    """Something that runs need before they start."""

    config: str  # file with the section of its command
    settings: Settings = Field(default_factory=dict)


class Scale(Prepared):
    """One size in which an item can be run; `settings` has the changes for all runs."""

    config: str = ""  # file with the `train` section of all runs; empty if nothing is trained
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    # Changes by axis and label, added to those of the item. An axis that is listed has these labels alone.
    axes: dict[str, dict[str, Settings]] = Field(default_factory=dict)
    columns: dict[str, Column] = Field(default_factory=dict)  # columns of this scale in place of the item's
    shards: dict[str, Prepared] = Field(default_factory=dict)  # by name, in their order; in $DECLUTR_WORK/shards
    start: Prepared | None = None  # run whose export, in $DECLUTR_WORK/start/export, the runs continue from
    preset: Literal["official", "prototyping"] = "official"  # settings of the classifiers
    hours: float | None = Field(default=None, gt=0)  # Expected hours of a run and its scores, before one has finished
    hours_before: float | None = Field(default=None, gt=0)  # Expected hours of the shards and the start


class KnownEncoder(Strict):
    """An encoder that is scored as it is."""

    name: str  # as `declutr evaluate` takes it
    pooling: Pooling | None = None


class Item(Strict):
    """One table or figure."""

    title: str
    source: str  # paper, and number of the table or figure
    says: str  # the paper's conclusion
    # Changes of settings by axis and label, of which `config` names another file. The runs are all combinations; the
    # first label of an axis is the one to which the others are compared.
    axes: dict[str, dict[str, Settings]] = Field(default_factory=dict)
    # Encoders by label that are scored without training; beside axes each label of these is compared with them.
    encoders: dict[str, KnownEncoder] = Field(default_factory=dict)
    # Pairs of labels of one axis to compare, first against second; none: each label with the axis' first one.
    pairs: tuple[tuple[str, str], ...] = ()
    columns: dict[str, Column] = Field(min_length=1)
    # The paper's numbers by run, its labels joined by ", ", and column.
    printed: dict[str, dict[str, float]] = Field(default_factory=dict)
    note: str = ""  # differences to the paper, and what its print leaves open
    scales: dict[ScaleName, Scale]

    @model_validator(mode="after")
    def _is_consistent(self) -> "Item":
        if problems := list(dict.fromkeys(_problems(self))):
            raise ValueError("\n".join(problems))
        return self

    def axes_of(self, scale: ScaleName) -> Axes:
        """The axes with the scale's changes."""
        own = self.scales[scale].axes
        return {
            axis: {label: labels.get(label, {}) | own[axis][label] for label in own[axis]} if axis in own else labels
            for axis, labels in self.axes.items()
        }

    def cells(self, scale: ScaleName) -> Iterator[tuple[dict[str, str], Prepared | KnownEncoder]]:
        """The encoders, the start of a scale's runs, then the combinations of labels, the last axis fastest.

        Each has its label by axis, that of encoders is "", and what is trained, or an encoder that is scored as it is.
        """
        for label, encoder in self.encoders.items():
            yield {"": label}, encoder
        size, axes = self.scales[scale], self.axes_of(scale)
        if size.start:
            yield {}, KnownEncoder(name=START)
        for combination in product(*(labels.items() for labels in axes.values())) if axes else ():
            values = size.settings | {key: value for _, changes in combination for key, value in changes.items()}
            source = Prepared(config=str(values.pop("config", size.config)), settings=values)
            yield dict(zip(axes, (label for label, _ in combination), strict=True)), source


def overlap(key: str, other: str) -> bool:
    """True if one of two dotted keys is the other or inside it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def unknown(where: str, words: Iterable[str], choices: Iterable[str], what: str) -> list[str]:
    """A problem for each word that is not among the choices; `where` stands before the word."""
    names = list(choices)
    return [f"{where}{word}: no {what}{suggest(word, names)}" for word in words if word not in names]


def _problems(item: Item) -> Iterator[str]:
    """Problems of an item as a whole, one line each."""
    if not (item.axes or item.encoders):
        yield "give axes or encoders"
    for name, scale in item.scales.items():
        if bool(scale.config) != bool(item.axes):
            yield f"scales.{name}.config: runs need one, and encoders that are not trained have none"
        yield from unknown(f"scales.{name}.axes.", scale.axes, item.axes, "axis of the item")
        columns = scale.columns or item.columns
        scored = [heading for heading, column in columns.items() if column.tasks]
        for heading, column in columns.items():
            yield from unknown(f"columns.{heading}.mean_of.", column.mean_of, scored, "column with tasks")
        yield from _axis_problems(item.axes_of(name))
    axis_of = {label: axis for axis, labels in item.axes.items() for label in labels}
    for pair in item.pairs:
        yield from unknown("pairs.", pair, axis_of, "label of an axis")
        if len(axes := dict.fromkeys(axis_of[label] for label in pair if label in axis_of)) > 1:
            yield f"pairs: {' and '.join(pair)} are labels of two axes, {' and '.join(axes)}"
    cells = [", ".join(labels) for labels in product(*item.axes.values())]
    yield from unknown("printed.", item.printed, [*item.encoders, *cells], "run of the item")
    for run, numbers in item.printed.items():
        yield from unknown(f"printed.{run}.", numbers, item.columns, "column")
    for key, value in flat_keys(item.model_dump()).items():
        if "trust_remote_code" in key.split(".") and value is not False:  # the file may come from someone else
            yield f"{key} cannot be granted by a file; if you trust the code of that model, add it to the command"


def _axis_problems(axes: Axes) -> Iterator[str]:
    """Problems of axes without labels, or that share a label or a setting: their effects could not be told apart."""
    axis_of, changed_by = dict[str, str](), dict[str, str]()  # a label of two axes could be meant by neither
    for axis, labels in axes.items():
        if not labels:
            yield f"axes.{axis}: has no label"
        for label, settings in labels.items():
            if axis_of.setdefault(label, axis) != axis:
                yield f"axes.{axis}.{label}: the axis {axis_of[label]} has this label, too"
            for key in settings:
                changed_by.setdefault(key, axis)
                for varied, other in changed_by.items():  # a setting of two axes would have the value of the last
                    if other != axis and overlap(key, varied):
                        yield f"axes.{axis}.{label}.{key}: the axis {other} changes {varied}"


def item_names() -> list[str]:
    """Names of the items that come with the project."""
    return sorted(path.stem for path in ITEMS.glob("*.yaml"))


def load_item(
    name: str,  # of an item, or a path to a file with one
) -> Item:
    """Reads an item."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else ITEMS / f"{name}.yaml"
    if not path.is_file():
        names = item_names()
        raise UsageError(f"no item {name}{suggest(name, names)}; the items are {', '.join(names)}")
    try:
        values = read_yaml_file(path)
        if isinstance(values, dict) and not {"title", "scales"} & values.keys():
            raise UsageError(f"{path} is no item, which has a title and scales; `declutr train` takes a configuration")
        return Item.model_validate(values)
    except YamlError as error:
        raise UsageError(f"{path} is not YAML that can be used: {error}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {'; '.join(describe(error, Item))}") from error
