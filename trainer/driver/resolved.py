"""A run whose places were looked up: what the driver knows of it from its configuration, its folder and its shards."""

from collections.abc import Mapping
from dataclasses import dataclass
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

    @property
    def plan(self) -> Plan:
        """The order of the main task's documents."""
        config, shards = self.config, self.manifest.of_split("train")
        return Plan(config.seed, sum(shard.num_documents for shard in shards), config.batch_documents)

    def training_shards(self) -> dict[str, ShardSet]:
        """The training split of each task."""
        return {name: ShardSet(folder, "train") for name, folder in self.data.items()}


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


def find_shards(config: TrainConfig) -> Found:
    """Reads the manifests of all shards of a run; fetches those at addresses."""
    found = Found({}, {}, None, {})
    places = {
        name: (f"auxiliary_tasks.{name}.data" if name else "data", one.data) for name, one in config.tasks().items()
    }
    for name, (key, place) in places.items():
        try:
            folder = data_folder(place, config.cache)
            found.data[name], found.manifests[name] = folder, load_manifest(folder)
        except (ShardError, RemoteError, OSError) as error:
            found.unreadable[key] = f"{key} = {place}: {error}"
    scored_at = config.validation.data
    if scored_at is None or not config.validation.every_steps:
        return found
    try:
        scored = load_manifest(data_folder(scored_at, config.cache))
    except (ShardError, RemoteError, OSError) as error:
        found.unreadable["validation.data"] = f"validation.data = {scored_at}: {error}"
        return found
    return Found(found.data, found.manifests, scored, found.unreadable)
