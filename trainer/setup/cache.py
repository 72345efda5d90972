"""Folders of a run and its shards on this host; for addresses, their copies in the cache folder."""

from functools import lru_cache
from pathlib import Path

from declutr.common.paths import expand
from declutr.common.stores.address import is_remote, short_name
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.shards import ShardSet
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
    folder, *others = (data_folder(place, config.cache) for place in config.places)
    return ShardSet(folder, "train", look=False, part=config.part, others=others)


@lru_cache
def _copy(address: str, cache: str) -> Path:
    """Fetches the copy; a process looks at the store once."""
    return Folder(address).cached(expand(cache).absolute())


def run_folder(run: str, cache: str) -> Path:
    """The folder of the run on this host; for an address, a folder in `cache`."""
    if is_remote(run):
        return expand(cache).absolute() / short_name(run)
    return expand(run).absolute()
