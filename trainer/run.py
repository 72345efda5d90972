"""A run, planned once: what its configuration, its folder and the manifests of its shards say. No torch, no Ray.

The driver builds the plan (`RunPlan.of`), checks it (trainer/driver/checks.py) and sends its configuration and its
identity to the workers as JSON. Each worker builds it again from what its own host holds and compares the identities.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any, Literal

import msgspec

from declutr.common.config import AnyPrecision, Precision
from declutr.common.errors import DamagedError, DataError, RemoteError, ShardError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file, read_json, read_record
from declutr.common.stores.address import is_remote, short_name
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.manifest import Manifest, data_hash, joined_manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.checkpoints.state import joint_hash
from declutr.trainer.config import TaskSettings, TrainConfig
from declutr.trainer.data.plan import Plan
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs
from declutr.trainer.objectives.config import SpanConfig

RESUME_SETTINGS = "resume_settings.json"  # the file of a run that holds the settings which decide its result
DEVICE = "device.json"  # the file of a run that holds the device and the precision with which it began
Device = Literal["cpu", "cuda"]
_UNREADABLE = (DataError, ShardError, RemoteError, UsageError, OSError)


@dataclass(frozen=True)
class RunPlan:
    """A run as its places were when they were looked up; nothing later looks one up again."""

    # as the user gave it, with the spans' geometry of the shards and the hashes of what `validation` names.
    config: TrainConfig
    folder: Path  # of the run on this host
    # folders of the shards of each task on this host, one for each corpus; "" for the main one. Tasks whose shards
    # cannot all be read are left out, here and in `corpora`.
    data: Mapping[str, tuple[Path, ...]]
    corpora: Mapping[str, tuple[Manifest, ...]]  # manifests of these shards
    scored: Manifest | None  # manifest of `validation.data`; None without, or without validations
    unreadable: Mapping[str, str]  # setting and reason of each that names something which cannot be read

    @staticmethod
    def of(config: TrainConfig) -> "RunPlan":
        """Reads the manifests of all shards of a run, and its judged pairs; fetches shards at addresses."""
        folder = run_folder(config.run, config.cache)
        folders, manifests, unreadable = dict[str, Path](), dict[str, Manifest](), dict[str, str]()
        tasks = {name: task.keyed_places for name, task in config.tasks().items()}
        for key, place in [item for places in tasks.values() for item in places.items()]:
            try:
                folders[key] = data_folder(place, config.cache)
                manifests[key] = load_manifest(folders[key])
            except _UNREADABLE as error:
                unreadable[key] = f"{key} = {place}: {error}"
        scored, contents = _scored(config, unreadable)
        readable = {name: places for name, places in tasks.items() if not places.keys() - manifests.keys()}
        corpora = {name: tuple(manifests[key] for key in places) for name, places in readable.items()}
        first = {name: task_corpora[0] for name, task_corpora in corpora.items()}  # the others must equal its geometry
        config = with_geometry(config, folder, first).with_contents(contents)
        data = {name: tuple(folders[key] for key in places) for name, places in readable.items()}
        return RunPlan(config, folder, data, corpora, scored, unreadable)

    def changed(self, **changes: Any) -> "RunPlan":
        """The plan with other settings that decide neither rows nor order."""
        return replace(self, config=self.config.model_copy(update=changes))

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """The manifest of each task's shards; of several corpora the joined one."""
        return {name: joined_manifest(manifests) for name, manifests in self.corpora.items()}

    @property
    def manifest(self) -> Manifest:
        """That of the main task."""
        return self.manifests[""]

    @cached_property
    def tasks(self) -> dict[str, TaskSettings]:
        """The tasks, the main one with the name ""."""
        return self.config.tasks()

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The hash of each task's shards."""
        return {name: data_hash(manifest) for name, manifest in self.manifests.items()}

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of the settings, of the shards, and of what each setting of `validation` names."""
        return {"config_hash": self.config.hash(), "data_hash": joint_hash(self.hashes), **self.config.contents}

    @cached_property
    def training_shards(self) -> dict[str, ShardSet]:
        """The training split of each task, whose shards the driver has checked."""
        return {
            name: ShardSet(folders[0], "train", look=False, part=self.tasks[name].part, others=folders[1:])
            for name, folders in self.data.items()
        }

    @cached_property
    def orders(self) -> dict[str, Plan]:
        """The order of each task's rows."""
        return {name: self.tasks[name].plan(shards.sizes) for name, shards in self.training_shards.items()}

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.total_steps(self.orders[""])

    def corpus_lines(self, steps: int, names: Sequence[str]) -> Iterator[str]:
        """Name, share, rows and passes of each corpus of the main task up to a step."""
        order = self.orders[""]
        for name, share, size, read in zip(names, order.shares, order.sizes, order.rows_read(steps), strict=True):
            of_all, passes = share / sum(order.shares), f"{read / size:,.3g} pass(es) over its {size:,}"
            yield f"{name}: {of_all:.1%} of the rows, {read:,} in {steps:,} steps, {passes}"

    def for_workers(self) -> dict[str, Any]:
        """The configuration with absolute paths, and the identity, as JSON."""
        # Ray starts each worker in a working directory of its own.
        return {"config": with_absolute_paths(self.config.model_dump(mode="json")), "identity": self.identity}


# What a run keeps from its first start.


class DeviceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of `device.json`."""

    device: Device
    # What the workers chose for `precision: auto`; None: they have not, or the setting says it.
    precision: Precision | None = None


def recorded_device(run: Path) -> DeviceRecord | None:
    """The device that a run has chosen; None before its first start."""
    path = run / DEVICE
    try:
        return read_record(path, DeviceRecord)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        # not chosen again: it could be the other device
        raise DamagedError(f'{error}; write {{"device": "cuda"}} or {{"device": "cpu"}} into it') from error


def kept_precision(setting: AnyPrecision, run: Path) -> AnyPrecision:
    """The setting `precision`, or what stands for `auto` in a run that has a checkpoint."""
    record = recorded_device(run) if setting == "auto" and steps_in(run / CHECKPOINTS) else None
    return setting if record is None or record.precision is None else record.precision


# Places on this host.


def run_folder(run: str, cache: str) -> Path:
    """The folder of the run on this host; for an address, a folder in `cache`."""
    if is_remote(run):
        return expand(cache).absolute() / short_name(run)
    return expand(run).absolute()


def data_folder(
    data: str,  # `data` of the configuration, a folder or an address
    cache: str,  # `cache` of the configuration
) -> Path:
    """The folder of the shards; for an address this host's copy, fetched at the first use."""
    return _copy(data, cache) if is_remote(data) else expand(data)


@lru_cache
def _copy(address: str, cache: str) -> Path:
    """Fetches the copy; a process looks at the store once."""
    return Folder(address).cached(expand(cache).absolute())


def _scored(config: TrainConfig, unreadable: dict[str, str]) -> tuple[Manifest | None, dict[str, str]]:
    """Manifest of `validation.data`, hashes of what `validation` names, if one takes place; adds to `unreadable`."""
    validation, contents, manifest = config.validation, dict[str, str](), None
    if validation.data is not None and validation.every_steps:
        try:
            manifest = load_manifest(data_folder(validation.data, config.cache))
            contents["data"] = data_hash(manifest)  # scores of other rows after a resume would not compare
        except _UNREADABLE as error:
            unreadable["validation.data"] = f"validation.data = {validation.data}: {error}"
    for score, place in validation.pairs.items():
        name = score.partition("_")[0]
        try:
            read_pairs(folder := expand(place), FILES[score])
            contents[name] = hash_file(folder / FILES[score].name)
        except (DataError, UsageError) as error:
            unreadable[f"validation.{name}"] = f"validation.{name} = {place}: {error}"
    return manifest, contents


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, as JSON, with absolute paths."""
    validation = {key: _absolute(values["validation"][key]) for key in ("data", "stsb", "sickr")}
    return values | {
        "run": _absolute(values["run"]),
        "data": _absolute_data(values["data"]),
        "encoder": _with_absolute_model(values["encoder"]),
        "validation": values["validation"] | validation,
        "auxiliary_tasks": {
            name: task | {"data": _absolute_data(task["data"]), "frontend": _with_absolute_model(task["frontend"])}
            for name, task in values["auxiliary_tasks"].items()
        },
    }


def _absolute(place: str | None) -> str | None:
    return place if place is None or is_remote(place) else str(expand(place).absolute())


def _absolute_data(data: Any) -> Any:
    if isinstance(data, str):
        return _absolute(data)
    return [corpus | {"path": _absolute(corpus["path"])} for corpus in data]


def _with_absolute_model(section: dict[str, Any]) -> dict[str, Any]:
    """A section whose `pretrained` names a model; the name of a folder becomes absolute."""
    folder = section["pretrained"] is not None and expand(section["pretrained"]).is_dir()
    return section | {"pretrained": _absolute(section["pretrained"])} if folder else section


# Span lengths and anchors that the user leaves to the shards.

_GEOMETRY = ("num_anchors", "max_tokens", "min_tokens")


def with_geometry(
    config: TrainConfig,  # of the run
    run: Path,  # folder of the run
    manifests: Mapping[str, Manifest],  # of each task's first corpus, if its shards can be read; "" for the main task
) -> TrainConfig:
    """The configuration with the shards' geometry for `spans` without `num_anchors`, `max_tokens` or `min_tokens`.

    A run with a checkpoint keeps the values it started with. Without a manifest the defaults stay. `min_tokens` is at
    most `max_tokens`.
    """
    spans = {name: _spans(task, run, manifests.get(name)) for name, task in config.tasks().items()}
    auxiliary = {name: task.model_copy(update={"spans": spans[name]}) for name, task in config.auxiliary_tasks.items()}
    return config.model_copy(update={"spans": spans[""], "auxiliary_tasks": auxiliary})


def _spans(task: TaskSettings, run: Path, manifest: Manifest | None) -> SpanConfig:
    """The completed spans of a task."""
    missing = [key for key in _GEOMETRY if key not in task.spans.model_fields_set]
    if not missing:
        return task.spans
    began = manifest is None or bool(steps_in(run / CHECKPOINTS))  # else nothing is computed yet
    values = _started_with(run, task.name) if began else {}
    if not values and manifest is not None:  # rows of short texts have no spans: the defaults stay
        geometry = manifest.geometry if manifest.content.kind == "documents" else task.spans
        values = {key: getattr(geometry, key) for key in _GEOMETRY}
    update = {key: values[key] for key in missing if key in values}
    if "min_tokens" in update:
        update["min_tokens"] = min(update["min_tokens"], update.get("max_tokens", task.spans.max_tokens))
    return task.spans.model_copy(update=update)


def unknown(config: TrainConfig) -> list[str]:
    """Names of the settings that `with_geometry` could not find, as dotted keys; none if rows have no spans."""
    if "documents" not in config.objective.reads:
        return []
    return [f"spans.{key}" for key in _GEOMETRY if key not in config.spans.model_fields_set]


def _started_with(run: Path, task: str) -> dict[str, Any]:
    """The spans of a task in the run's settings; empty where there are none."""
    path = ("auxiliary_tasks", task, "spans") if task else ("spans",)
    try:
        spans = reduce(lambda tree, key: tree[key], path, read_json(run / RESUME_SETTINGS))
        return {key: int(spans[key]) for key in _GEOMETRY}
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: the checks report it
        return {}
