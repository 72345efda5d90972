"""Where a run and its shards lie on this host: where they are named, or in `cache` where that is an address."""

from functools import lru_cache
from pathlib import Path

from common.paths import expand
from common.stores.address import is_remote, short_name
from common.stores.folders import local_copy
from trainer.setup.config import TrainConfig


def data_folder(config: TrainConfig) -> Path:
    """The folder of the shards; where `data` is an address, this host's copy, fetched at the first use.

    Raises:
        OSError: it cannot be fetched.
    """
    return _copy(config.data, config.cache) if is_remote(config.data) else expand(config.data)


@lru_cache
def _copy(address: str, cache: str) -> Path:
    """One look at the store a process."""
    return local_copy(address, expand(cache).absolute())


def run_folder(config: TrainConfig) -> Path:
    """The folder of the run, on this host."""
    if is_remote(config.run):
        return expand(config.cache).absolute() / short_name(config.run)
    return expand(config.run).absolute()
