"""The runs of an item: their configurations, checked before anything starts, and what they need."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from declutr.common.storage import hash_json, read_json
from declutr.common.stores.address import is_remote
from declutr.common.suggestions import suggest
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.runner.plan import VERSIONS
from declutr.pipeline.config import PipelineConfig
from declutr.reproduction.configs import load_made, prompt_of, refuse_unknown_scores, replaced, run_config
from declutr.reproduction.item import (
    DATA,
    SENTEVAL,
    START,
    WORK,
    Cell,
    Column,
    Item,
    KnownEncoder,
    ReproduceError,
    Scale,
    ScaleName,
    Settings,
    overlap,
)
from declutr.reproduction.readiness import (
    data_identity,
    encoder_identity,
    made_from,
    refuse_other,
    run_ready,
    shards_ready,
    start_ready,
)
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.driver.resolved import find_shards
from declutr.trainer.setup.config import TrainConfig

_OWN = ("run", "seed")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+-]+")
_HOUR = 3600.0


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

    @property
    def scores(self) -> Path:
        """File of its scores."""
        return self.folder / "scores.json"


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
        partial: True if `runs` are not all cells and seeds of the scale.
        runs: the runs, one seed after the other, so that every cell has one soon.
    """

    name: str
    item: Item
    scale: ScaleName
    folder: Path
    shards: dict[str, PipelineConfig]
    start: TrainConfig | None
    partial: bool
    runs: list[PlannedRun]

    @property
    def settings(self) -> Scale:
        """Settings of the scale."""
        return self.item.scales[self.scale]

    @property
    def columns(self) -> dict[str, Column]:
        """Scored numbers by heading."""
        return self.settings.columns or self.item.columns

    @property
    def classifier(self) -> ClassifierConfig:
        """Settings of the classifiers."""
        official = self.settings.preset == "official"
        return ClassifierConfig.official() if official else ClassifierConfig.prototyping()

    @property
    def results(self) -> str:
        """Name of the files with the results, without its end. A part does not replace the results of the whole."""
        return "results-part" if self.partial else "results"

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks that are scored."""
        return tuple(dict.fromkeys(task for column in self.columns.values() for task in column.names))

    def identity(self, run: PlannedRun) -> str:
        """Hash of what decides the scores of a run, beside the data of its tasks."""
        known = run.cell.encoder
        made_by: list[Any] = [known and [known.model_dump(mode="json"), encoder_identity(known.name)]]
        if run.config is not None:
            made_by += [run.config.hash(), made_from(run.config), data_identity(run.config)]
        columns = {name: column.model_dump(mode="json") for name, column in self.columns.items()}
        return hash_json([made_by, columns, self.classifier.model_dump(mode="json"), dict(VERSIONS)])

    def finished(self, run: PlannedRun, data: str | None = None) -> dict[str, Any] | None:
        """Scores and seconds of a finished run; None if it has none of these settings, or of other data.

        Args:
            run: the run.
            data: hash of the tasks' data; None: any.
        """
        try:
            found: dict[str, Any] = read_json(run.scores)
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("identity") != self.identity(run):
            return None
        return found if data in (None, found["data"]) else None

    def lines(self) -> list[str]:
        """The plan as text."""
        cells = [run for run in self.runs if run.seed == self.runs[0].seed]
        done = {run.folder: found for run in self.runs if (found := self.finished(run))}
        seeds = sorted({run.seed for run in self.runs})
        lines = [
            f"{self.item.title} ({self.item.source}), scale {self.scale}",
            f"  runs       {len(cells)} cells x {len(seeds)} seed(s) {seeds}: {len(self.runs)}, {len(done)} finished",
            f"  scores     {', '.join(self.columns)}",
            f"  folder     {self.folder}",
        ]
        lines += [
            f"  shards     {name}: {'ready' if shards_ready(config) else f'to be prepared in {config.output}'}"
            for name, config in self.shards.items()
        ]
        if self.start is not None:
            state = "ready" if start_ready(self.start) else f"to be trained in {self.start.steps} steps"
            lines.append(f"  start      {state}")
        width = max(len(run.cell.name) for run in cells)
        lines += [f"  {run.cell.name:<{width}}  {_needs(run)}" for run in cells]
        trains = any(run.config for run in self.runs)
        counted = [run for run in self.runs if run.folder in done and (run.config or not trains)]
        seconds = [done[run.folder]["seconds"] for run in counted]
        return [*lines, f"  time       {self._time(len(self.runs) - len(done), seconds)}"]

    def _time(self, left: int, seconds: Sequence[float]) -> str:
        if seconds:
            each, origin = median(seconds), f"median of {len(seconds)} finished run(s)"
        elif self.settings.hours is not None:
            each, origin = self.settings.hours * _HOUR, "expected"
        else:
            return f"{left} runs left; unknown until one has finished, or declutr train --plan on one of them"
        return f"{left} runs left: {left * each / _HOUR:.1f} hours ({each:,.0f} s a run, {origin})"


def plan_item(
    name: str,
    item: Item,
    scale: ScaleName,
    data: Path,
    senteval: Path,
    work: Path,
    changes: Settings,
    seeds: Sequence[int] | None,
    given_start: Path | None = None,
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
        given_start: folder of an encoder to start from, in place of the start that the scale trains.
        only: labels whose cells are run, or names of cells; none: all.

    Raises:
        ReproduceError: the item lacks the scale or takes no start, settings of a run are wrong, or its folder has a run
            of others.
    """
    if scale not in item.scales:
        raise ReproduceError(f"{name} has no scale {scale}; it has {', '.join(item.scales)}")
    settings = item.scales[scale]
    if own := [key for key in changes if key in _OWN]:
        raise ReproduceError(f"{own[0]} is set by the command: --work and --seeds change it")
    if not item.axes and (changes or seeds):
        raise ReproduceError(f"{name} trains nothing: it takes neither settings nor --seeds")
    work = work.resolve()
    os.environ[DATA], os.environ[SENTEVAL], os.environ[WORK] = str(data.resolve()), str(senteval.resolve()), str(work)
    encoder = given_start.resolve() if given_start else work / "start" / EXPORT
    os.environ[START] = str(encoder)
    folder = work / f"{name}-{scale}"
    shards = {
        key: load_made(one, "prepare", PipelineConfig, f"shards {key}", {"output": f"${WORK}/shards/{key}"})
        for key, one in settings.shards.items()
    }
    start = None
    if settings.start is not None:
        start = load_made(settings.start, "train", TrainConfig, "start", {"run": f"${WORK}/start"})
    cells = item.cells(scale)
    varied = dict.fromkeys(key for cell in cells for key in cell.settings)
    one_of = {*TrainConfig.alternatives}
    if both := [(key, own) for key in changes for own in varied if overlap(key, own) or {key, own} <= one_of]:
        raise ReproduceError(
            f"{both[0][0]} cannot be changed for all runs, which differ in {both[0][1]}; change a copy of its file"
        )
    labels = list(dict.fromkeys(label for cell in cells for label in (*cell.labels.values(), cell.name)))
    if unknown := [label for label in only if label not in labels]:
        raise ReproduceError(f"--only {unknown[0]}: no label of {name}{suggest(unknown[0], labels)}")
    seeds = seeds or settings.seeds
    chosen = [cell for cell in cells if not only or {*only} & {cell.name, *cell.labels.values()}]
    with_start = any(cell.encoder for cell in chosen)  # whose pooling is that of all runs
    configs = {
        (cell.name, seed): run_config(settings, cell, changes, {"run": str(_place(folder, cell, seed)), "seed": seed})
        for seed in seeds
        for cell in (cells if with_start else chosen)
        if cell.encoder is None
    }
    poolings = {config.encoder.pooling for config in configs.values()}
    runs: list[PlannedRun] = []
    for seed in seeds:
        for cell in chosen:
            config = configs.get((cell.name, seed))
            if cell.encoder is not None:
                if seed != seeds[0]:
                    continue  # scored once
                values = replaced(cell.encoder.model_dump())
                if len(poolings) == 1:  # else a comparison with the start would be one of poolings, too
                    values["pooling"] = next(iter(poolings))
                cell = replace(cell, encoder=KnownEncoder.model_validate(values))
            runs.append(PlannedRun(cell, seed, config, _place(folder, cell, seed).parent))
    for number, run in enumerate(runs):
        if run.folder in [one.folder for one in runs[:number]]:
            raise ReproduceError(f"{name}: two runs would have the folder {run.folder}; give each label and seed once")
        if run.config is not None:
            refuse_unknown_scores(settings.columns or item.columns, run.config, run.cell.name)
            run_ready(run.config)
            refuse_other(run.folder, made_from(run.config))
    if given_start is not None:
        if start is None or any(run.config and run.config.encoder.pretrained != os.environ[START] for run in runs):
            raise ReproduceError(f"{name} takes no --start: the encoder of its runs is not ${START}")
        if prompt := prompt_of(encoder):
            raise ReproduceError(
                f"--start {given_start}: puts {prompt!r} before each text, and its runs would not; name an encoder "
                "without a default prompt"
            )
        start = None
    if given_start is not None or only:
        read = json.dumps([one.model_dump(mode="json") for one in (start, *(run.config for run in runs)) if one])
        shards = {key: one for key, one in shards.items() if json.dumps(one.output) in read}
    partial = len(chosen) < len(cells) or not {*settings.seeds} <= {*seeds}
    return ItemPlan(name, item, scale, folder, shards, start, partial, runs)


def _place(folder: Path, cell: Cell, seed: int) -> Path:
    """Folder of a run."""
    return folder / f"{_UNSAFE.sub('-', cell.name)}-{seed}" / "run"


def _needs(run: PlannedRun) -> str:
    """Steps and rows of a run."""
    config = run.config
    if config is None:
        return f"{run.cell.encoder.name}, scored as it is" if run.cell.encoder else ""
    found = None if any(map(is_remote, config.places)) else find_shards(config)
    manifest = found and found.manifests.get("")
    rows = round(manifest.totals["kept_train"] * config.data_fraction) if manifest else None
    noun = manifest.noun if manifest else "rows"
    share = "" if config.data_fraction == 1 else f" of {config.data_fraction:.0%}"
    if config.steps is not None:
        total = config.steps * config.batch_documents
        passes = f", {total / rows:.3g} pass(es){share}" if rows else share
        return f"{config.steps:,} steps x {config.batch_documents} {noun} = {total:,}{passes}"
    epochs = config.epochs or 1.0
    if rows is None:
        places = " and ".join(config.places)
        return f"{epochs:g} pass(es){share} over {places}, which is not prepared, {config.batch_documents} a step"
    steps = max(1, -(-int(epochs * rows) // config.batch_documents))
    return f"{steps:,} steps x {config.batch_documents} {noun}: {epochs:g} pass(es) over {rows:,}{share}"
