"""The runs of an item at a scale: their configurations, folders, shards and start, and the columns with data.

A run is identified by its settings and the bytes of what it reads, not by its folder. Scores of other settings, shards,
encoders, judged pairs or SentEval files are never shown, and their folders are refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from declutr.common.config import Strict, flat_keys, load_config
from declutr.common.errors import ConfigError, EncoderError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file, hash_json, read_json, write_json
from declutr.common.stores.address import is_remote
from declutr.encoders.modules import read_recipe
from declutr.evaluation.senteval.harness import VERSIONS
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.tasks import find
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys
from declutr.pipeline.config import identity as shard_identity
from declutr.pipeline.shards.manifest import MANIFEST, data_hash, load_manifest
from declutr.reproduction.item import START, Column, Item, KnownEncoder, Prepared, ScaleName, overlap, unknown
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.continuation import SUMMARY, changes
from declutr.trainer.metrics.judged_pairs import FILES

Config = TypeVar("Config", bound=Strict)
_ABSENT = "not on this machine"  # content of an encoder at the hub, or shards in a store or not yet prepared


@dataclass(frozen=True)
class PlannedRun:
    """A combination of labels with a seed: a training, or an encoder that is scored as it is."""

    labels: Mapping[str, str]  # label by axis; none of the encoder that the runs start from
    seed: int  # its seed; the first one of an encoder that is scored as it is
    results: Path  # folder of the item's results
    config: TrainConfig | None = None
    encoder: KnownEncoder | None = None

    @property
    def cell(self) -> str:
        """The labels, joined; "start" without any."""
        return ", ".join(self.labels.values()) or "start"

    @property
    def folder(self) -> Path:
        """Folder of its scores; the run is in `folder/run`."""
        return self.results / f"{re.sub(r'[^A-Za-z0-9._=+-]+', '-', self.cell)}-{self.seed}"

    @property
    def name(self) -> str:
        """Cell and seed."""
        return f"{self.cell}, seed {self.seed}"


class ItemPlan:
    """All runs of an item at a scale."""

    def __init__(
        self,
        name: str,  # name of the item
        item: Item,  # the item
        scale: ScaleName,  # one of its scales
        data: Path,  # folder with all input data
        senteval: Path,  # folder in SentEval's layout
        work: Path,  # folder of shards, the start and all results; one command at a time works there
        words: Sequence[str] = (),  # further changes of settings, `key=value`, for all runs
        seeds: Sequence[int] | None = None,  # seeds in place of the scale's
        start: Path | None = None,  # folder of an encoder to start from, in place of the start that the scale trains
        only: Sequence[str] = (),  # labels whose cells are run, or names of cells; none: all
    ) -> None:
        if scale not in item.scales:
            raise UsageError(f"{name} has no scale {scale}; it has {', '.join(item.scales)}")
        if not item.axes and (words or seeds):
            raise UsageError(f"{name} trains nothing: it takes neither settings nor --seeds")
        self.name, self.item, self.scale, self.senteval, self.work = name, item, scale, senteval, work.resolve()
        self.settings, self.folder = item.scales[scale], self.work / f"{name}-{scale}"
        encoder = start.resolve() if start else self.work / "start" / EXPORT
        self._places = {"$DECLUTR_DATA": data.resolve(), "$DECLUTR_SENTEVAL": senteval.resolve()}
        self._places |= {"$DECLUTR_WORK": self.work, START: encoder}
        self._words, self._keys = words, [word.partition("=")[0] for word in words]
        self._refuse_varied()
        seeds = seeds or self.settings.seeds  # the outer loop, so that a table has all cells soon
        runs = [
            self._planned(labels, source, seed)
            for seed in seeds
            for labels, source in item.cells(scale)
            if seed == seeds[0] or isinstance(source, Prepared)  # an encoder that is not trained is scored once
        ]
        labels = dict.fromkeys(word for run in runs for word in (*run.labels.values(), run.cell))
        for problem in unknown("--only ", only, labels, f"label of {name}, which has {', '.join(labels)}"):
            raise UsageError(problem)
        if len({run.folder for run in runs}) < len(runs):
            raise UsageError(f"{name}: two runs would have one folder; give each label and seed once")
        poolings = {run.config.encoder.pooling for run in runs if run.config}
        if len(poolings) == 1:  # else a comparison with the start would be one of poolings, too
            alike = KnownEncoder(name=str(encoder), pooling=poolings.pop())
            runs = [run if run.labels else replace(run, encoder=alike) for run in runs]
        self.runs = [run for run in runs if not only or {*only} & {run.cell, *run.labels.values()}]
        self.start: TrainConfig | None = None  # configuration of the run to start from
        if start is not None:
            self._refuse_start(start, encoder)
        elif self.settings.start is not None:
            self.start = self._load("start", self.settings.start, "train", TrainConfig, run="$DECLUTR_WORK/start")
        self.shards = {
            key: self._load(f"shards {key}", source, "prepare", PipelineConfig, output=f"$DECLUTR_WORK/shards/{key}")
            for key, source in self.settings.shards.items()
        }  # configurations of the shards to prepare, by name
        if start is not None or only:  # shards that nothing reads are not prepared
            trained = [config for config in (self.start, *(run.config for run in self.runs)) if config]
            reading = json.dumps([config.model_dump(mode="json") for config in trained])
            self.shards = {key: config for key, config in self.shards.items() if json.dumps(config.output) in reading}
        columns = self.settings.columns or item.columns
        self.unscored = _unscored(columns, senteval)  # reason of each column that is left out, as a task has no data
        self.columns = {heading: column for heading, column in columns.items() if heading not in self.unscored}
        less = len(self.runs) < len(runs) or not {*self.settings.seeds} <= {*seeds}
        self.partial = less or bool(self.unscored)  # not all cells, seeds and columns of the scale are here
        self.results = "results-part" if self.partial else "results"  # a part does not replace the whole
        self.classifier = ClassifierConfig() if self.settings.preset == "official" else ClassifierConfig.prototyping()

    def _planned(self, labels: Mapping[str, str], source: Prepared | KnownEncoder, seed: int) -> PlannedRun:
        run = PlannedRun(labels, seed, self.folder)
        if isinstance(source, KnownEncoder):
            return replace(run, encoder=self._placed(source))
        own = {"run": str(run.folder / "run"), "seed": seed}
        return replace(run, config=self._load(run.cell, source, "train", TrainConfig, self._words, **own))

    def _load(
        self, what: str, source: Prepared, section: str, model: type[Config], words: Sequence[str] = (), **own: Any
    ) -> Config:
        """The settings of a source with its own ones and the words of the command."""
        keys = self._keys if words else []  # the start and shards keep their own values
        exclusive = [*model.alternatives] if {*model.alternatives} & {*keys} else []  # epochs replace steps
        # the dot ends a key; a section that is given replaces what the item has of it
        replaced = tuple(f"{key}." for key in (*keys, *exclusive))
        values = {key: value for key, value in source.settings.items() if not f"{key}.".startswith(replaced)} | own
        overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        try:
            return self._placed(load_config(source.config, section, model, [*overrides, *words]))
        except ConfigError as error:
            raise UsageError(f"{what}: {'; '.join(error.problems)} ({source.config})") from error

    def _placed(self, config: Config) -> Config:
        """Settings with the variables of items replaced."""
        text = json.dumps(config.model_dump(mode="json", exclude_unset=True))  # shards complete what is not set
        for variable, place in self._places.items():
            text = text.replace(variable, json.dumps(str(place))[1:-1])  # a place may have quotes
        return type(config).model_validate(json.loads(text))

    def _refuse_varied(self) -> None:
        """Refuses a change for all runs of a setting in which they differ; a label would no longer be what it says."""
        if own := [key for key in self._keys if key in ("run", "seed")]:
            raise UsageError(f"{own[0]} is set by the command: --work and --seeds change it")
        labels = [settings for labels in self.item.axes_of(self.scale).values() for settings in labels.values()]
        for key, varied in product(self._keys, dict.fromkeys(key for settings in labels for key in settings)):
            if overlap(key, varied) or {key, varied} <= {*TrainConfig.alternatives}:
                raise UsageError(
                    f"{key} cannot be changed for all runs, which differ in {varied}; change a copy of its file"
                )

    def _refuse_start(self, start: Path, encoder: Path) -> None:
        """Refuses an encoder from which not all runs start, or that puts a text before each one."""
        others = any(run.config and run.config.encoder.pretrained != str(encoder) for run in self.runs)
        if others:
            raise UsageError(f"{self.name} takes no --start: the encoder of its runs is not {START}")
        if self.settings.start is None:
            raise UsageError(f"{self.name} takes no --start: its scale {self.scale} has no `start` to replace")
        try:
            recipe = read_recipe(str(encoder), "mean")  # the runs decide the pooling
        except EncoderError as error:
            raise UsageError(f"--start: {error}") from error
        if recipe and recipe.prompt:
            raise UsageError(
                f"--start {start}: puts {recipe.prompt!r} before each text, and its runs would not; name an encoder "
                "without a default prompt"
            )


def _unscored(columns: Mapping[str, Column], senteval: Path) -> dict[str, str]:
    """The reason of each column that cannot be scored."""

    def reason(column: Column) -> str:
        tasks = [find(task) for task in column.names]
        absent = [task.label for task in tasks if not any((senteval / name).is_file() for name in task.paths)]
        if absent:
            return f"no data of {', '.join(absent)} in {senteval}"
        return next((f"needs {other}" for other in column.mean_of if reason(columns[other])), "")

    return {heading: words for heading, column in columns.items() if (words := reason(column))}


def made_from(config: TrainConfig) -> dict[str, Any]:
    """What decides a run: settings by dotted key, and contents (hashes) of the shards, encoders and pairs it reads."""
    validation, best = config.validation, config.export == "best"
    values = flat_keys(config.resume_settings())  # without folders, which may move
    for name, task in config.tasks().items():
        prefix = f"auxiliary_tasks.{name}." if name else ""
        values[f"{prefix}data (content)"] = [*map(_shards_content, task.places)]
        if place := (config.auxiliary_tasks[name].frontend if name else config.encoder).pretrained:
            values[f"{prefix or 'encoder.'}pretrained (content)"] = _encoder_content(place)
    for score, place in validation.pairs.items():
        values[f"validation.{score.partition('_')[0]}"] = _content(expand(place), FILES[score].name)
    if validation.data:
        values["validation.data"] = _shards_content(validation.data) if validation.every_steps else None
    values["checkpoint.every_steps"] = config.checkpoint.every_steps if best else None  # of these one is chosen
    values["validation.patience"] = validation.patience
    return values


def _encoder_content(name: str) -> str:
    """Hash of an encoder's files; of a run, those of its export or else of its newest checkpoint, as it is loaded."""
    place = expand(re.sub(r"^(untrained(@\d+)?|words):", "", name))  # its configuration and tokenizer are files, too
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
    if is_remote(place) or not (expand(place) / MANIFEST).is_file():  # a plan opens no address
        return _ABSENT
    return data_hash(load_manifest(expand(place)))[:16]


def _record_of(run: str) -> Path:
    return Path(f"{run}.made_from.json")


def write_record(config: TrainConfig) -> None:
    """Writes what `made_from` returns to a file beside the run's folder, before the run is trained."""
    write_json(_record_of(config.run), made_from(config))


def _made_from_now(config: TrainConfig) -> dict[str, Any]:
    """What `made_from` returns; what is not on this machine now is as it was when the run began."""
    now, before = made_from(config), read_json(_record_of(config.run)) if _record_of(config.run).is_file() else {}
    absent = [key for key, value in now.items() if _ABSENT in (value if isinstance(value, list) else [value])]
    return now | {key: before[key] for key in absent if key in before}


def run_ready(config: TrainConfig) -> bool:
    """True if a run, or the start, has finished. What is not on this machine now is not compared."""
    run = Path(config.run)
    if _record_of(config.run).is_file():
        if changed := changes(read_json(_record_of(config.run)), _made_from_now(config)):
            raise UsageError(
                f"{run}: was trained with other settings or data ({'; '.join(changed)}); delete it, or name another "
                "--work"
            )
    elif steps_in(run / CHECKPOINTS) or (run / SUMMARY).is_file():
        raise UsageError(f"{run}: has a run, and no {_record_of(config.run).name} beside it; name another --work")
    return (run / SUMMARY).is_file()  # written behind the last step and the export


def shards_ready(config: PipelineConfig) -> bool:
    """True if the shards are complete."""
    if not (Path(config.output) / MANIFEST).is_file():
        return False
    manifest = load_manifest(Path(config.output))
    if manifest.config_hash != config_hash(config):
        others = ", ".join(differing_keys(shard_identity(config), manifest.config))
        raise UsageError(f"{config.output}: was prepared with other settings ({others}); name another --work")
    return True


def identity(plan: ItemPlan, run: PlannedRun) -> str:
    """Hash of what decides the scores of a run, beside the data of its tasks."""
    trained = _made_from_now(run.config) if run.config else None
    scored = [run.encoder.model_dump(mode="json"), _encoder_content(run.encoder.name)] if run.encoder else None
    columns = {name: column.model_dump(mode="json") for name, column in plan.columns.items()}
    return hash_json([trained, scored, columns, plan.classifier.identity(), dict(VERSIONS)])


def scores_of(
    plan: ItemPlan,  # the item
    run: PlannedRun,  # the run
    data: str | None = None,  # hash of the tasks' data; None: any
) -> dict[str, Any] | None:
    """Scores and seconds of a finished run; None if it has none of these settings, or of other data."""
    try:
        record: dict[str, Any] = read_json(run.folder / "scores.json")
    except (FileNotFoundError, ValueError):
        return None
    same = isinstance(record, dict) and record.get("identity") == identity(plan, run)
    return record if same and data in (None, record["data"]) else None
