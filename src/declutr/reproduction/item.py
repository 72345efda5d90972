"""A table or figure of a paper as a file: what it varies, what is scored, what was printed; and the runs it needs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from declutr.common.config import Strict, describe, load_config
from declutr.common.errors import ConfigError, EncoderError, UsageError
from declutr.common.suggestions import suggest
from declutr.common.yamlfile import YamlError, read_yaml_file
from declutr.encoders.modules import read_recipe
from declutr.encoders.protocol import Pooling
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.runner.plan import choose_tasks
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.setup.config import TrainConfig

ITEMS = Path(__file__).resolve().parent.parent / "configs" / "reproduce"
"""Folder of the items."""
START = "$DECLUTR_START"
"""The encoder to start from, as the files of items write it; they also write $DECLUTR_DATA, the folder with all input
data, $DECLUTR_SENTEVAL, SentEval's data, and $DECLUTR_WORK, the working folder."""
ScaleName = Literal["paper", "tiny"]
Settings = dict[str, Any]
"""Values by dotted key."""
Axes = Mapping[str, Mapping[str, Settings]]
"""Changes of settings by axis and label."""
Config = TypeVar("Config", bound=Strict)


class Column(Strict):
    """A number of each run: the mean over tasks, or over other columns."""

    tasks: tuple[str, ...] = ()
    """Tasks of SentEval, or sets of them."""
    number: Literal["mean", "wmean", "all", "dev", "all_dev"] = "mean"
    """Number of a task. mean: as DeCLUTR prints it, with the mean of the subsets for STS12-16. wmean: the same with
    their mean weighted by pairs. all: as SimCSE prints it, by cosine over all pairs, MRPC by accuracy. dev, all_dev: as
    mean and all, on development data; STS12-16, which have none, on test."""
    mean_of: tuple[str, ...] = ()
    """Other columns, in place of tasks."""
    checkpoint: Literal["exported", "last"] = "exported"
    """Encoder that the tasks score. exported: the one that the run chooses by its setting `export`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> "Column":
        if bool(self.tasks) == bool(self.mean_of):
            raise ValueError("give one of tasks and mean_of")
        try:
            choose_tasks(self.tasks)
        except UsageError as error:
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
    def _is_consistent(self) -> "Item":
        if bool(self.axes) == bool(self.encoders):
            raise ValueError("give axes or encoders, and not both")
        axis_of = {label: axis for axis, labels in self.axes.items() for label in labels}
        problems = []
        for scale_name, scale in self.scales.items():
            if bool(scale.config) != bool(self.axes):
                problems.append(
                    f"scales.{scale_name}.config: runs need one, and encoders that are not trained have none"
                )
            problems += _unknown(f"scales.{scale_name}.axes", scale.axes, self.axes, "axis of the item")
            columns = scale.columns or self.columns
            scored = [heading for heading, column in columns.items() if column.tasks]
            for heading, column in columns.items():
                problems += _unknown(f"columns.{heading}.mean_of", column.mean_of, scored, "column with tasks")
            problems += _axis_problems(self._axes(scale_name))
        for pair in self.pairs:
            problems += _unknown("pairs", pair, axis_of, "label of an axis")
            axes = dict.fromkeys(axis_of[label] for label in pair if label in axis_of)
            if len(axes) > 1:
                problems.append(f"pairs: {' and '.join(pair)} are labels of two axes, {' and '.join(axes)}")
        cells = [cell.name for cell in _combined(self.axes)] if self.axes else [*self.encoders]
        problems += _unknown("printed", self.printed, cells, "run of the item")
        for name, numbers in self.printed.items():
            problems += _unknown(f"printed.{name}", numbers, self.columns, "column")
        problems += [  # the file may come from someone else
            f"{key} cannot be granted by a file; if you trust the code of that model, add it to the command"
            for key in _trusts(self.model_dump())
        ]
        if problems:
            raise ValueError("\n".join(dict.fromkeys(problems)))
        return self

    def cells(self, scale: ScaleName) -> list["Cell"]:
        """The encoders; or the start of a scale's runs, then the combinations of labels, the last axis fastest."""
        if self.encoders:
            return [Cell({"encoder": label}, {}, encoder) for label, encoder in self.encoders.items()]
        start = [Cell({}, {}, KnownEncoder(name=START))] if self.scales[scale].start else []
        return [*start, *_combined(self._axes(scale))]

    def _axes(self, scale: ScaleName) -> Axes:
        """The axes with the scale's changes."""
        own = self.scales[scale].axes
        return {
            axis: {label: labels.get(label, {}) | own[axis][label] for label in own[axis]} if axis in own else labels
            for axis, labels in self.axes.items()
        }


@dataclass(frozen=True)
class Cell:
    """One combination of labels, a run for each seed.

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


@dataclass(frozen=True)
class PlannedRun:
    """A cell with a seed.

    Attributes:
        cell: the cell.
        seed: its seed; the first one of an encoder that is scored as it is.
        config: configuration of its training; None for an encoder that is scored as it is.
        folder: folder of its scores; the run is in `folder/run`.
    """

    cell: Cell
    seed: int
    config: TrainConfig | None
    folder: Path


@dataclass(frozen=True)
class ItemPlan:
    """All runs of an item at a scale.

    Attributes:
        name: name of the item.
        item: the item.
        scale: name of the scale.
        folder: folder of the item's results.
        shards: configurations of the shards to prepare, by name.
        start: configuration of the run to start from, or None.
        columns: scored numbers by heading.
        unscored: reason of each column that is left out, because a task has no data.
        partial: True if not all cells, seeds and columns of the scale are here.
        runs: the runs, one seed after the other, so that every cell has one soon.
    """

    name: str
    item: Item
    scale: ScaleName
    folder: Path
    shards: dict[str, PipelineConfig]
    start: TrainConfig | None
    columns: dict[str, Column]
    unscored: dict[str, str]
    partial: bool
    runs: list[PlannedRun]

    @property
    def settings(self) -> Scale:
        """Settings of the scale."""
        return self.item.scales[self.scale]

    @property
    def results(self) -> str:
        """Name of the files with the results, without its end. A part does not replace the results of the whole."""
        return "results-part" if self.partial else "results"


def plan_item(
    name: str,
    item: Item,
    scale: ScaleName,
    data: Path,
    senteval: Path,
    work: Path,
    changes: Settings,
    seeds: Sequence[int] | None,
    start: Path | None = None,
    only: Sequence[str] = (),
) -> ItemPlan:
    """Plans the runs of an item.

    Args:
        name: name of the item.
        item: the item.
        scale: one of its scales.
        data: folder with all input data.
        senteval: folder in SentEval's layout.
        work: folder of shards, the start and all results.
        changes: further changes of settings, for all runs.
        seeds: seeds in place of the scale's.
        start: folder of an encoder to start from, in place of the start that the scale trains.
        only: labels whose cells are run, or names of cells; none: all.

    Raises:
        UsageError: the item lacks the scale or takes no start, or settings of a run are wrong.
    """
    if scale not in item.scales:
        raise UsageError(f"{name} has no scale {scale}; it has {', '.join(item.scales)}")
    settings, work = item.scales[scale], work.resolve()
    for key in ("run", "seed"):
        if key in changes:
            raise UsageError(f"{key} is set by the command: --work and --seeds change it")
    if not item.axes and (changes or seeds):
        raise UsageError(f"{name} trains nothing: it takes neither settings nor --seeds")
    cells, folder = item.cells(scale), work / f"{name}-{scale}"
    _refuse_varied(changes, cells)
    labels = dict.fromkeys(label for cell in cells for label in (*cell.labels.values(), cell.name))
    for problem in _unknown("--only", only, labels, f"label of {name}"):
        raise UsageError(problem)

    encoder = start.resolve() if start else work / "start" / EXPORT
    places = {"$DECLUTR_DATA": data.resolve(), "$DECLUTR_SENTEVAL": senteval.resolve(), "$DECLUTR_WORK": work}
    places[START] = encoder

    def load(source: Prepared, section: str, model: type[Config], what: str, own: Settings) -> Config:
        words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (source.settings | own).items()]
        try:
            config = load_config(source.config, section, model, words)
        except ConfigError as error:
            raise UsageError(f"{what}: {'; '.join(error.problems)} ({source.config})") from error
        return _placed(config, places)

    def planned(cell: Cell, seed: int) -> PlannedRun:
        place = folder / f"{re.sub(r'[^A-Za-z0-9._=+-]+', '-', cell.name)}-{seed}"
        if cell.encoder is not None:
            return PlannedRun(replace(cell, encoder=_placed(cell.encoder, places)), seed, None, place)
        source = _changed(settings, cell, changes)
        own = {"run": str(place / "run"), "seed": seed}
        return PlannedRun(cell, seed, load(source, "train", TrainConfig, cell.name, own), place)

    chosen = [cell for cell in cells if not only or {*only} & {cell.name, *cell.labels.values()}]
    seeds = seeds or settings.seeds
    runs = [
        planned(cell, seed)
        for seed in seeds
        for cell in chosen
        if cell.encoder is None or seed == seeds[0]  # an encoder that is not trained is scored once
    ]
    if len({run.folder for run in runs}) < len(runs):
        raise UsageError(f"{name}: two runs would have one folder; give each label and seed once")
    if settings.start and any(run.cell.encoder for run in runs):
        trained = (planned(cell, seeds[0]).config for cell in cells if cell.encoder is None)
        poolings = {config.encoder.pooling for config in trained if config}
        if len(poolings) == 1:  # else a comparison with the start would be one of poolings, too
            alike = KnownEncoder(name=str(encoder), pooling=poolings.pop())
            runs = [replace(run, cell=replace(run.cell, encoder=alike)) if run.cell.encoder else run for run in runs]
    shards = {
        key: load(source, "prepare", PipelineConfig, f"shards {key}", {"output": f"$DECLUTR_WORK/shards/{key}"})
        for key, source in settings.shards.items()
    }
    first = None
    if start is not None:
        _refuse_start(name, start, settings, runs, encoder)
    elif settings.start is not None:
        first = load(settings.start, "train", TrainConfig, "start", {"run": "$DECLUTR_WORK/start"})
    if start is not None or only:  # shards that nothing reads are not prepared
        reading = json.dumps(
            [config.model_dump(mode="json") for config in (first, *(run.config for run in runs)) if config]
        )
        shards = {key: config for key, config in shards.items() if json.dumps(config.output) in reading}
    columns, unscored = _with_data(settings.columns or item.columns, senteval)
    partial = len(chosen) < len(cells) or not {*settings.seeds} <= {*seeds} or bool(unscored)
    return ItemPlan(name, item, scale, folder, shards, first, columns, unscored, partial, runs)


def _changed(scale: Scale, cell: Cell, changes: Settings) -> Prepared:
    """The file and settings of a run; a section of the command replaces what the item has of it."""
    exclusive = {*TrainConfig.alternatives}  # steps of the command replace epochs of the item
    dropped = exclusive if exclusive & changes.keys() else set()
    inside = tuple(f"{key}." for key in changes)
    values = scale.settings | cell.settings
    values = {key: value for key, value in values.items() if key not in dropped and not key.startswith(inside)}
    values |= changes
    return Prepared(config=str(values.pop("config", scale.config)), settings=values)


def _placed(config: Config, places: Mapping[str, Path]) -> Config:
    """Settings with the variables of this project replaced."""
    text = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    for variable, place in places.items():
        text = text.replace(variable, json.dumps(str(place))[1:-1])
    return type(config).model_validate(json.loads(text))


def _refuse_varied(changes: Settings, cells: Sequence[Cell]) -> None:
    """Refuses a change for all runs of a setting in which they differ; the labels would no longer be what they say."""
    exclusive = {*TrainConfig.alternatives}
    for key, varied in product(changes, dict.fromkeys(key for cell in cells for key in cell.settings)):
        if _overlap(key, varied) or {key, varied} <= exclusive:
            raise UsageError(
                f"{key} cannot be changed for all runs, which differ in {varied}; change a copy of its file"
            )


def _refuse_start(name: str, start: Path, scale: Scale, runs: Sequence[PlannedRun], encoder: Path) -> None:
    """Refuses an encoder from which not all runs start, or that puts a text before each one."""
    if scale.start is None or any(run.config and run.config.encoder.pretrained != str(encoder) for run in runs):
        raise UsageError(f"{name} takes no --start: the encoder of its runs is not {START}")
    try:
        recipe = read_recipe(str(encoder), "mean")  # the runs decide the pooling
    except EncoderError as error:
        raise UsageError(f"--start: {error}") from error
    if recipe and recipe.prompt:
        raise UsageError(
            f"--start {start}: puts {recipe.prompt!r} before each text, and its runs would not; name an encoder "
            "without a default prompt"
        )


def _with_data(columns: Mapping[str, Column], senteval: Path) -> tuple[dict[str, Column], dict[str, str]]:
    """The columns that can be scored, and the reason of each other one."""
    unscored = {}
    for heading, column in columns.items():
        tasks = [find(task) for task in column.names]
        absent = [task for task in tasks if not any((senteval / name).is_file() for name in task_files(task))]
        if absent:
            unscored[heading] = f"no data of {', '.join(task.label for task in absent)} in {senteval}"
    for heading, column in columns.items():
        if other := next((other for other in column.mean_of if other in unscored), None):
            unscored[heading] = f"needs {other}"
    return {heading: column for heading, column in columns.items() if heading not in unscored}, unscored


def _overlap(key: str, other: str) -> bool:
    """True if one of two dotted keys is the other or inside it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _unknown(where: str, words: Iterable[str], choices: Iterable[str], what: str) -> list[str]:
    """A problem for each word that is not among the choices."""
    known_words = list(choices)
    return [f"{where}.{word}: no {what}{suggest(word, known_words)}" for word in words if word not in known_words]


def _axis_problems(axes: Axes) -> list[str]:
    """Problems of axes without labels, or that share a label or a setting: their effects could not be told apart."""
    problems = [f"axes.{axis}: has no label" for axis, labels in axes.items() if not labels]
    for (axis, labels), (other, others) in combinations(axes.items(), 2):
        keys = dict.fromkeys(key for settings in labels.values() for key in settings)
        for label, settings in others.items():
            if label in labels:
                problems.append(f"axes.{other}.{label}: the axis {axis} has this label, too")
            problems += [
                f"axes.{other}.{label}.{key}: the axis {axis} changes {varied}"
                for key, varied in product(settings, keys)
                if _overlap(key, varied)
            ]
    return problems


def _combined(axes: Axes) -> list[Cell]:
    """The combinations of all labels, the last axis fastest."""
    cells = []
    for combination in product(*(labels.items() for labels in axes.values())):
        settings = {key: value for _, changes in combination for key, value in changes.items()}
        cells.append(Cell(dict(zip(axes, (label for label, _ in combination), strict=True)), settings))
    return cells


def _trusts(tree: Any, path: str = "") -> list[str]:
    """Dotted keys of every trust in remote code that a file would grant."""
    keys = []
    for key, value in tree.items() if isinstance(tree, dict) else ():
        full = f"{path}.{key}" if path else str(key)
        own = str(key).rpartition(".")[2] == "trust_remote_code" and value is not False
        keys += [full] if own else _trusts(value, full)
    return keys


def item_names() -> list[str]:
    """Names of the items that come with the project."""
    return sorted(path.stem for path in ITEMS.glob("*.yaml"))


def load_item(name: str) -> Item:
    """Reads an item.

    Args:
        name: of an item, or a path to a file with one.

    Raises:
        UsageError: there is no such item, or its file has a problem.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else ITEMS / f"{name}.yaml"
    if not path.is_file():
        names = item_names()
        raise UsageError(f"no item {name}{suggest(name, names)}; the items are {', '.join(names)}")
    try:
        return Item.model_validate(read_yaml_file(path))
    except YamlError as error:
        raise UsageError(f"{path} is not YAML that can be used: {error}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {'; '.join(describe(error, Item))}") from error
