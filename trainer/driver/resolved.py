"""A run whose places were looked up: what the driver knows of it from its configuration, its folder and its shards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from declutr.common.errors import RemoteError, ShardError, UsageError
from declutr.pipeline.shards.manifest import Manifest, joined_manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.checkpoints.state import data_hashes, joint_hash
from declutr.trainer.data.plan import Plan
from declutr.trainer.setup.cache import data_folder, scored_contents
from declutr.trainer.setup.config import TrainConfig


@dataclass(frozen=True)
class ResolvedRun:
    """A run as the checks found it; nothing later looks a place up again.

    Attributes:
        config: as the user gave it, with the spans' geometry of the shards.
        folder: of the run on this host.
        data: folders of the shards of each task on this host, one for each corpus; "" for the main one.
        manifests: of these shards; of several corpora the joined one.
        scored: manifest of `validation.data`; None without.
    """

    config: TrainConfig
    folder: Path
    data: Mapping[str, tuple[Path, ...]]
    manifests: Mapping[str, Manifest]
    scored: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        """That of the main task."""
        return self.manifests[""]

    @property
    def identity(self) -> dict[str, str]:
        """Hashes of the settings, of the shards, and of what each setting of `validation` names."""
        data = joint_hash(data_hashes(self.manifests))
        return {"config_hash": self.config.hash(), "data_hash": data, **self.config.contents}

    @cached_property
    def plan(self) -> Plan:
        """The order of the main task's documents."""
        return self.config.plan(self.training_shards[""].sizes)

    @cached_property
    def training_shards(self) -> dict[str, ShardSet]:
        """The training split of each task."""
        tasks = self.config.tasks()
        return {
            name: ShardSet(folder, "train", look=False, part=tasks[name].part, others=other_folders)
            for name, (folder, *other_folders) in self.data.items()
        }

    def corpus_lines(self, steps: int, names: Sequence[str]) -> Iterator[str]:
        """Name, share, rows and passes of each corpus of the main task up to a step."""
        plan = self.plan
        for name, share, size, read in zip(names, plan.shares, plan.sizes, plan.rows_read(steps), strict=True):
            of_all, passes = share / sum(plan.shares), f"{read / size:,.3g} pass(es) over its {size:,}"
            yield f"{name}: {of_all:.1%} of the rows, {read:,} in {steps:,} steps, {passes}"


@dataclass(frozen=True)
class Found:
    """The shards that a configuration names, as far as they can be read.

    Attributes:
        data: folders of the corpora by task.
        corpora: their manifests by task.
        scored: manifest of `validation.data`, if it is set and validations take place.
        contents: hash of what each setting of `validation` names, if validations take place.
        unreadable: setting and reason of each that cannot be read.
    """

    data: dict[str, tuple[Path, ...]]
    corpora: dict[str, tuple[Manifest, ...]]
    scored: Manifest | None
    contents: dict[str, str]
    unreadable: dict[str, str]

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """The manifest of each task's shards; of several corpora the joined one."""
        return {name: joined_manifest(manifests) for name, manifests in self.corpora.items()}


def data_key(task: str) -> str:
    """Name of the setting with the shards of a task; "" is the main one."""
    return f"auxiliary_tasks.{task}.data" if task else "data"


def data_places(config: TrainConfig) -> dict[str, dict[str, str]]:
    """Folders or addresses of each task's corpora by the settings that name them."""
    places = dict[str, dict[str, str]]()
    for name, task in config.tasks().items():
        key, several = data_key(name), len(task.places) > 1
        places[name] = {f"{key}.{n}.path" if several else key: place for n, place in enumerate(task.places)}
    return places


def find_shards(config: TrainConfig) -> Found:
    """Reads the manifests of all shards of a run, and its judged pairs; fetches shards at addresses."""
    tasks = data_places(config)
    places = {key: place for task_places in tasks.values() for key, place in task_places.items()}
    folders, manifests = dict[str, Path](), dict[str, Manifest]()
    contents, unreadable, scored = scored_contents(config)
    for key, place in places.items():
        try:
            folder = data_folder(place, config.cache)
            folders[key], manifests[key] = folder, load_manifest(folder)
        except (ShardError, RemoteError, UsageError, OSError) as error:
            unreadable[key] = f"{key} = {place}: {error}"
    read = {name: task_places for name, task_places in tasks.items() if not task_places.keys() - manifests.keys()}
    return Found(
        {name: tuple(folders[key] for key in task_places) for name, task_places in read.items()},
        {name: tuple(manifests[key] for key in task_places) for name, task_places in read.items()},
        scored,
        contents,
        unreadable,
    )
