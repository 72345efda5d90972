"""The runs of an item at a scale: their configurations, folders, shards and start, and the columns with data."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from declutr.common.config import Strict, load_config
from declutr.common.errors import ConfigError, EncoderError, UsageError
from declutr.encoders.modules import read_recipe
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.tasks import find
from declutr.pipeline.config import PipelineConfig
from declutr.reproduction.item import START, Axes, Column, Item, KnownEncoder, Prepared, ScaleName, overlap, unknown
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.setup.config import TrainConfig

Config = TypeVar("Config", bound=Strict)
_SHARDS = "$DECLUTR_WORK/shards"


@dataclass(frozen=True)
class PlannedRun:
    """A combination of labels with a seed.

    Attributes:
        cell: the labels, joined; "start" without any.
        labels: label by axis; none of the encoder that the runs start from.
        seed: its seed; the first one of an encoder that is scored as it is.
        folder: folder of its scores; the run is in `folder/run`.
        config: configuration of its training; None for an encoder that is scored as it is.
        encoder: encoder that is scored as it is, or None.
    """

    cell: str
    labels: Mapping[str, str]
    seed: int
    folder: Path
    config: TrainConfig | None = None
    encoder: KnownEncoder | None = None

    @property
    def name(self) -> str:
        """Cell and seed."""
        return f"{self.cell}, seed {self.seed}"


class ItemPlan:
    """All runs of an item at a scale.

    Args:
        name: name of the item.
        item: the item.
        scale: one of its scales.
        data: folder with all input data.
        senteval: folder in SentEval's layout.
        work: folder of shards, the start and all results. One command at a time prepares them or works on an item.
        words: further changes of settings, `key=value`, for all runs.
        seeds: seeds in place of the scale's.
        start: folder of an encoder to start from, in place of the start that the scale trains.
        only: labels whose cells are run, or names of cells; none: all.

    Raises:
        UsageError: the item lacks the scale or takes no start, or settings of a run are wrong.
    """

    def __init__(
        self,
        name: str,
        item: Item,
        scale: ScaleName,
        data: Path,
        senteval: Path,
        work: Path,
        words: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        start: Path | None = None,
        only: Sequence[str] = (),
    ) -> None:
        if scale not in item.scales:
            raise UsageError(f"{name} has no scale {scale}; it has {', '.join(item.scales)}")
        if not item.axes and (words or seeds):
            raise UsageError(f"{name} trains nothing: it takes neither settings nor --seeds")
        self.name, self.item, self.scale, self.senteval, self.work = name, item, scale, senteval, work.resolve()
        self.settings = item.scales[scale]
        """Settings of the scale."""
        self.folder = self.work / f"{name}-{scale}"
        """Folder of the item's results."""
        encoder = start.resolve() if start else self.work / "start" / EXPORT
        self._places = {"$DECLUTR_DATA": data.resolve(), "$DECLUTR_SENTEVAL": senteval.resolve()}
        self._places |= {"$DECLUTR_WORK": self.work, START: encoder}
        seeds = seeds or self.settings.seeds
        _refuse_varied(_keys(words), item.axes_of(scale))
        runs = [
            self._planned(labels, source, seed, words)
            for seed in seeds
            for labels, source in item.cells(scale)
            if seed == seeds[0] or isinstance(source, Prepared)  # an encoder that is not trained is scored once
        ]
        labels = dict.fromkeys(word for run in runs for word in (*run.labels.values(), run.cell))
        for problem in unknown("--only", only, labels, f"label of {name}"):
            raise UsageError(problem)
        if len({run.folder for run in runs}) < len(runs):
            raise UsageError(f"{name}: two runs would have one folder; give each label and seed once")
        poolings = {run.config.encoder.pooling for run in runs if run.config}
        if len(poolings) == 1:  # else a comparison with the start would be one of poolings, too
            alike = KnownEncoder(name=str(encoder), pooling=poolings.pop())
            runs = [replace(run, encoder=alike) if run.encoder else run for run in runs]
        self.runs = [run for run in runs if not only or {*only} & {run.cell, *run.labels.values()}]
        """The runs, one seed after the other, so that every cell has one soon."""
        self.start: TrainConfig | None = None
        """Configuration of the run to start from, or None."""
        if start is not None:
            self._refuse_start(start, encoder)
        elif self.settings.start is not None:
            self.start = self._load("start", self.settings.start, "train", TrainConfig, {"run": "$DECLUTR_WORK/start"})
        self.shards = {
            key: self._load(f"shards {key}", source, "prepare", PipelineConfig, {"output": f"{_SHARDS}/{key}"})
            for key, source in self.settings.shards.items()
        }
        """Configurations of the shards to prepare, by name."""
        if start is not None or only:  # shards that nothing reads are not prepared
            trained = [config for config in (self.start, *(run.config for run in self.runs)) if config]
            reading = json.dumps([config.model_dump(mode="json") for config in trained])
            self.shards = {key: config for key, config in self.shards.items() if json.dumps(config.output) in reading}
        columns = self.settings.columns or item.columns
        self.unscored = _unscored(columns, senteval)
        """Reason of each column that is left out, because a task has no data."""
        self.columns = {heading: column for heading, column in columns.items() if heading not in self.unscored}
        """Scored numbers by heading."""
        less = len(self.runs) < len(runs) or not {*self.settings.seeds} <= {*seeds}
        self.partial = less or bool(self.unscored)
        """True if not all cells, seeds and columns of the scale are here."""
        self.results = "results-part" if self.partial else "results"
        """Name of the files with the results, without its end. A part does not replace the results of the whole."""
        official = self.settings.preset == "official"
        self.classifier = ClassifierConfig.official() if official else ClassifierConfig.prototyping()
        """Settings of the classifiers."""

    def _planned(
        self, labels: Mapping[str, str], source: Prepared | KnownEncoder, seed: int, words: Sequence[str]
    ) -> PlannedRun:
        cell = ", ".join(labels.values()) or "start"
        run = PlannedRun(cell, labels, seed, self.folder / f"{re.sub(r'[^A-Za-z0-9._=+-]+', '-', cell)}-{seed}")
        if isinstance(source, KnownEncoder):
            return replace(run, encoder=_placed(source, self._places))
        own = {"run": str(run.folder / "run"), "seed": seed}
        return replace(run, config=self._load(cell, source, "train", TrainConfig, own, words))

    def _load(
        self,
        what: str,
        source: Prepared,
        section: str,
        model: type[Config],
        own: dict[str, Any],
        words: Sequence[str] = (),
    ) -> Config:
        """The settings of a source with its own ones and the words of the command."""
        exclusive = [*model.alternatives] if {*model.alternatives} & {*_keys(words)} else []  # epochs replace steps
        replaced = tuple(f"{key}." for key in (*_keys(words), *exclusive))
        values = {key: value for key, value in source.settings.items() if not f"{key}.".startswith(replaced)} | own
        overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        try:
            return _placed(load_config(source.config, section, model, [*overrides, *words]), self._places)
        except ConfigError as error:
            raise UsageError(f"{what}: {'; '.join(error.problems)} ({source.config})") from error

    def _refuse_start(self, start: Path, encoder: Path) -> None:
        """Refuses an encoder from which not all runs start, or that puts a text before each one."""
        others = any(run.config and run.config.encoder.pretrained != str(encoder) for run in self.runs)
        if self.settings.start is None or others:
            raise UsageError(f"{self.name} takes no --start: the encoder of its runs is not {START}")
        try:
            recipe = read_recipe(str(encoder), "mean")  # the runs decide the pooling
        except EncoderError as error:
            raise UsageError(f"--start: {error}") from error
        if recipe and recipe.prompt:
            raise UsageError(
                f"--start {start}: puts {recipe.prompt!r} before each text, and its runs would not; name an encoder "
                "without a default prompt"
            )


def _keys(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words]


def _placed(config: Config, places: Mapping[str, Path]) -> Config:
    """Settings with the variables of this project replaced."""
    text = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    for variable, place in places.items():
        text = text.replace(variable, json.dumps(str(place))[1:-1])
    return type(config).model_validate(json.loads(text))


def _refuse_varied(keys: Sequence[str], axes: Axes) -> None:
    """Refuses a change for all runs of a setting in which they differ; the labels would no longer be what they say."""
    if own := [key for key in keys if key in ("run", "seed")]:
        raise UsageError(f"{own[0]} is set by the command: --work and --seeds change it")
    exclusive = {*TrainConfig.alternatives}
    labels = [settings for labels in axes.values() for settings in labels.values()]
    for key, varied in product(keys, dict.fromkeys(key for settings in labels for key in settings)):
        if overlap(key, varied) or {key, varied} <= exclusive:
            raise UsageError(
                f"{key} cannot be changed for all runs, which differ in {varied}; change a copy of its file"
            )


def _unscored(columns: Mapping[str, Column], senteval: Path) -> dict[str, str]:
    """The reason of each column that cannot be scored."""
    reasons = {}
    for heading, column in columns.items():
        tasks = [find(task) for task in column.names]
        absent = [task.label for task in tasks if not any((senteval / name).is_file() for name in task.paths)]
        if absent:
            reasons[heading] = f"no data of {', '.join(absent)} in {senteval}"
    for heading, column in columns.items():
        if other := next((other for other in column.mean_of if other in reasons), None):
            reasons[heading] = f"needs {other}"
    return reasons
