"""A run whose places were looked up: what the driver knows of it from its configuration, its folder and its shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from declutr.common.stores.retry import RemoteError
from declutr.pipeline.shards.manifest import Manifest, ShardError, load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.plan import Plan
from declutr.trainer.setup.cache import data_folder
from declutr.trainer.setup.config import TrainConfig


@dataclass(frozen=True)
class ResolvedRun:
    """A run as the checks found it; nothing later looks a place up again.

    Attributes:
        config: as the user gave it, with the spans' geometry of the shards.
        folder: of the run on this host.
        data: folder of the shards of each task on this host; "" for the main one.
        manifests: of these shards.
        scored: manifest of `validation.data`; None without.
    """

    config: TrainConfig
    folder: Path
    data: Mapping[str, Path]
    manifests: Mapping[str, Manifest]
    scored: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        """That of the main task."""
        return self.manifests[""]

    @cached_property
    def plan(self) -> Plan:
        """The order of the main task's documents."""
        config = self.config
        if config.part is not None:
            documents = ShardSet(self.data[""], "train", part=config.part).num_documents
        else:
            documents = sum(shard.num_documents for shard in self.manifest.of_split("train"))
        return Plan(config.seed, documents, config.batch_documents)

    def training_shards(self) -> dict[str, ShardSet]:
        """The training split of each task."""
        tasks = self.config.tasks()
        return {name: ShardSet(folder, "train", part=tasks[name].part) for name, folder in self.data.items()}


@dataclass(frozen=True)
class Found:
    """The shards that a configuration names, as far as they can be read.

    Attributes:
        data: folders by task.
        manifests: by task.
        scored: manifest of `validation.data`, if it is set and validations take place.
        unreadable: setting and reason of each that cannot be read.
    """

    data: dict[str, Path]
    manifests: dict[str, Manifest]
    scored: Manifest | None
    unreadable: dict[str, str]


def data_key(task: str) -> str:
    """Name of the setting with the shards of a task; "" is the main one."""
    return f"auxiliary_tasks.{task}.data" if task else "data"


def find_shards(config: TrainConfig) -> Found:
    """Reads the manifests of all shards of a run; fetches those at addresses."""
    places = {data_key(name): task.data for name, task in config.tasks().items()}
    if config.validation.data is not None and config.validation.every_steps:
        places["validation.data"] = config.validation.data
    folders, manifests, unreadable = dict[str, Path](), dict[str, Manifest](), dict[str, str]()
    for key, place in places.items():
        try:
            folder = data_folder(place, config.cache)
            folders[key], manifests[key] = folder, load_manifest(folder)
        except (ShardError, RemoteError, OSError) as error:
            unreadable[key] = f"{key} = {place}: {error}"
    read = [name for name in config.tasks() if data_key(name) in manifests]
    return Found(
        {name: folders[data_key(name)] for name in read},
        {name: manifests[data_key(name)] for name in read},
        manifests.get("validation.data"),
        unreadable,
    )
