"""Folders of a run and its shards on this host; for addresses, their copies in the cache folder."""

from functools import lru_cache
from pathlib import Path

from declutr.common.errors import DataError, RemoteError, ShardError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.common.stores.address import is_remote, short_name
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.manifest import Manifest, data_hash, load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs
from declutr.trainer.setup.config import TrainConfig


def data_folder(data: str, cache: str) -> Path:
    """The folder of the shards; for an address this host's copy, fetched at the first use.

    Args:
        data: `data` of the configuration, a folder or an address.
        cache: `cache` of the configuration.

    Raises:
        OSError: it cannot be fetched.
    """
    return _copy(data, cache) if is_remote(data) else expand(data)


def training_set(config: TrainConfig) -> ShardSet:
    """The training rows of a task, whose shards the driver has checked.

    Args:
        config: configuration of the task.

    Raises:
        OSError: shards cannot be fetched.
        ShardError: they cannot be read.
    """
    folder, *other_folders = (data_folder(place, config.cache) for place in config.places)
    return ShardSet(folder, "train", look=False, part=config.part, others=other_folders)


@lru_cache
def _copy(address: str, cache: str) -> Path:
    """Fetches the copy; a process looks at the store once."""
    return Folder(address).cached(expand(cache).absolute())


def run_folder(run: str, cache: str) -> Path:
    """The folder of the run on this host; for an address, a folder in `cache`."""
    if is_remote(run):
        return expand(cache).absolute() / short_name(run)
    return expand(run).absolute()


# What a validation reads beside the run's own held-out rows, named by its content.


def scored_contents(config: TrainConfig) -> tuple[dict[str, str], dict[str, str], Manifest | None]:
    """Hashes of what `validation.data`, `stsb` and `sickr` name on this host, and what is wrong with the others.

    Returns:
        Hashes by setting; setting and reason of each that cannot be read; the manifest of `validation.data`, if it can
        be read. All are empty if no validation takes place.
    """
    validation, contents, unreadable = config.validation, dict[str, str](), dict[str, str]()
    manifest = None
    if validation.data is not None and validation.every_steps:
        try:
            manifest = load_manifest(data_folder(validation.data, config.cache))
            contents["data"] = data_hash(manifest)
        except (ShardError, RemoteError, UsageError, OSError) as error:
            unreadable["validation.data"] = f"validation.data = {validation.data}: {error}"
    for score, place in validation.pairs.items():
        name = score.partition("_")[0]
        try:
            read_pairs(folder := expand(place), FILES[score])
            contents[name] = hash_file(folder / FILES[score].name)
        except (DataError, UsageError) as error:
            unreadable[f"validation.{name}"] = f"validation.{name} = {place}: {error}"
    return contents, unreadable, manifest
