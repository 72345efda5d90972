"""Opening of the output that a configuration names, in a folder or in an object store."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from declutr.common.config import ConfigError
from declutr.common.paths import expand
from declutr.common.stores.address import child, is_remote
from declutr.common.stores.files import pull_file
from declutr.common.stores.retry import RetryPolicy
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.estimate import ESTIMATE
from declutr.pipeline.job.opened import Output
from declutr.pipeline.job.output_store import OutputStore
from declutr.pipeline.job.progress import PROGRESS
from declutr.pipeline.job.stored import StoredOutput

_HELD = ".held"


@contextlib.contextmanager
def open_output(config: PipelineConfig) -> Iterator[Output]:
    """The output that a configuration names, for one command.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
        ConfigError: `cache` cannot be written.
    """
    if not is_remote(config.output):
        yield Output(config, expand(config.output).absolute())
        return
    store = OutputStore(config.output, config.cache, config.storage_retry_seconds)
    try:
        store.cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cache = {config.cache}: {error.strerror}; name a folder of this host that can be written"
        raise ConfigError("prepare", [problem]) from error
    for left in store.cache_dir.glob("command-*"):
        _remove_unless_held(left)
    with (
        tempfile.TemporaryDirectory(prefix="command-", dir=store.cache_dir) as name,
        Path(name, _HELD).open("w") as held,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        output = StoredOutput(config, store, Path(name))
        output.refresh()
        yield output
    with contextlib.suppress(OSError):  # other files of this output are left
        store.cache_dir.rmdir()


def _remove_unless_held(folder: Path) -> None:
    """Removes the folder of a killed command, whose lock the kernel has released."""
    with contextlib.suppress(OSError), (folder / _HELD).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def small_files(config: PipelineConfig) -> Iterator[Path]:
    """A folder with the estimate and the progress of an output, as far as they exist."""
    if not is_remote(config.output):
        yield expand(config.output)
        return
    with tempfile.TemporaryDirectory(prefix="declutr-") as folder:
        for name in (ESTIMATE, PROGRESS):
            with contextlib.suppress(OSError):  # they only serve the last message
                pull_file(child(config.output, name), Path(folder, name), RetryPolicy(total_seconds=0.0))
        yield Path(folder)
