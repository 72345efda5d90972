"""The output of a preparation in an object store, and the opening of an output in either place."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from declutr.common.cluster import SessionConfig, started_cluster
from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, UsageError
from declutr.common.lock import LOCK, StoreLock
from declutr.common.paths import expand
from declutr.common.storage import LISTING, Files, record_of
from declutr.common.stores.address import is_remote
from declutr.common.stores.copies import PLAN
from declutr.common.stores.folder import Folder, RetryPolicy
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.search import RemoteKeys, find_duplicates
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.output import Output, PreparePlan
from declutr.pipeline.job.output_store import SENT, SHARED, OutputStore, holds, units_in
from declutr.pipeline.job.progress import PROGRESS
from declutr.pipeline.job.unit_writer import matching_sidecar
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Sidecar

_SINGLE = (PLAN, PROGRESS, DUPLICATES, MANIFEST)
"""Files of the command itself, the manifest last."""
_HELD = ".held"


class StoredOutput(Output):
    """An output in an object store. `folder` is temporary: a command starts from what the store has.

    Every method raises RemoteError if the store refuses, or did not answer in time.
    """

    store: OutputStore

    def __init__(self, config: PipelineConfig, store: OutputStore, folder: Path) -> None:
        super().__init__(config, folder)
        self.store, self.remote = store, store.remote
        self._there: dict[str, int] = {}
        self._files: dict[tuple[str, str], Files] = {}
        self._listing: Files | None = None
        self._ended = False

    @property
    def name(self) -> str:
        """The output in messages."""
        return self.store.remote.url

    @property
    def session(self) -> SessionConfig:
        """The place where the tasks run: if none is set, the cluster of this host, because no host's disk matters."""
        session = self.config.session
        if session != SessionConfig() or "RAY_ADDRESS" in os.environ:
            return session
        return SessionConfig(address=started_cluster())

    def names(self) -> list[str]:
        """Names of the files and folders at the address."""
        return sorted({name.partition("/")[0] for name in self._there})

    def is_complete(self) -> bool:
        """Returns True if the output has the list of its files, and they have the sizes in it."""
        if self._listing is None or not holds(self._there, self._listing):
            return False
        if {CANDIDATES, SENT} & set(self.names()):  # the command that wrote the list was killed
            with contextlib.suppress(OSError):
                self._clear()
        return True

    @contextlib.contextmanager
    def owned(self, lost: Callable[[], None]) -> Iterator[None]:
        """Keeps other commands away from the address; `lost` is called if one has taken it over.

        Raises:
            RunLockedError: another command holds the address.
        """
        with StoreLock(self.remote, lost):
            try:
                yield
            finally:
                if not self._ended and (self.folder / PROGRESS).exists():
                    with contextlib.suppress(OSError):  # it serves only messages
                        Folder(self.remote.url, RetryPolicy(total_seconds=0.0)).put(PROGRESS, self.folder / PROGRESS)

    def refresh(self) -> None:
        """Fetches the small files of the output: plan, tokenizer, sidecars of finished units."""
        self._there, self._files = self.store.finished()
        self._listing = self.remote.listing() if LISTING in self._there else None
        for place, files in units_in(self._listing or {}, "select" if self.config.duplicates.enabled else "prepare"):
            if holds(self._there, files):
                self._files.setdefault(place, files)
        for name in _SINGLE:
            if name == DUPLICATES and (self.folder / name).exists():  # it never changes, and may be large
                continue
            if name in self._there and (name != MANIFEST or self._listing is not None):
                self.remote.pull(name, self.folder / name)
        missing = {
            name: record
            for place, files in self._files.items()
            for name, record in files.items()
            if place == SHARED or Path(name).parent.name == "units"
            if not (self.folder / name).exists() or record_of(self.folder / name) != record
        }
        self.remote.fetch_all(missing, self.folder)

    def write_plan(self, plan: PreparePlan) -> None:
        """Sends the plan unless the store has one."""
        super().write_plan(plan)
        if PLAN not in self._there:
            self.remote.put(PLAN, self.folder / PLAN)

    def share(self) -> None:
        """Sends the tokenizer and the index of evaluation sets, unless the store has them."""
        names = [path.relative_to(self.folder).as_posix() for path in sorted((self.folder / TOKENIZER).glob("*"))]
        names += [INDEX] if (self.folder / INDEX).exists() else []
        if SHARED not in self._files:
            self._files[SHARED] = self.store.send_finished(*SHARED, self.folder, names)

    def finished_sidecar(self, unit: Unit, stage: str) -> Sidecar | None:
        """The sidecar of a unit that a stage has finished; `refresh` fetches only sidecars of units with all files."""
        return matching_sidecar(unit, self.target(stage), self.config)

    def note(self, stage: str, unit: str, files: Files) -> None:
        """Notes the files of a unit that a task has sent."""
        self._files[stage, unit] = files

    def shared_files(self, stage: str) -> Files:
        """The tokenizer and the index of evaluation sets; to select, also the list of duplicates."""
        select = {DUPLICATES: record_of(self.folder / DUPLICATES)} if stage == "select" else {}
        return self._files[SHARED] | select

    def files_of(self, stage: str, unit: str) -> Files:
        """The candidates of a unit, to select from."""
        return self._files["prepare", unit] if stage == "select" else {}

    def find_duplicates(self, units: list[str], labels: list[str] | None = None) -> None:
        """Searches for duplicates among the candidates of all units, with a copy of their keys on each host.

        Raises:
            ShardError: a file of keys is missing, damaged, or was written with other settings.
        """
        names = {
            name.removeprefix(f"{CANDIDATES}/"): record
            for (stage, _), files in self._files.items()
            if stage == "prepare"
            for name, record in files.items()
            if name.startswith(f"{CANDIDATES}/keys/")
        }
        keys = RemoteKeys(self.remote / CANDIDATES, names, self.store.copies)
        self._keep(find_duplicates(keys.copy(), units, self.config.duplicates, self.session, keys, labels))

    def _keep(self, duplicates: Path) -> None:
        super()._keep(duplicates)
        self.remote.put(DUPLICATES, self.folder / DUPLICATES)

    def complete(self) -> None:
        """Sends the manifest and then the list of all files, and removes what only the work needed."""
        stage = "select" if self.config.duplicates.enabled else "prepare"
        files = {
            name: record
            for place, sent in self._files.items()
            if place[0] in (stage, SHARED[0])
            for name, record in sent.items()
        }
        files |= self.remote.put_all(self.folder, [name for name in _SINGLE if (self.folder / name).is_file()])
        self.remote.commit(dict(sorted(files.items())))
        self._ended = True
        try:
            self._clear()
            self.store.sweep()
        except OSError as error:
            get_logger().warning("%s is complete; what only the work needed could not be removed: %s", self.name, error)

    def _clear(self) -> None:
        for name in (CANDIDATES, SENT):
            (self.remote / name).clear()

    def discard(self) -> None:
        """Removes everything at the address, except the lock; a plan at the address shows that it is ours."""
        for name, kind in self.remote.kinds().items():
            if kind == "file" and name not in ("", LOCK):
                self.remote.delete(name)
            elif kind != "file" and name:
                (self.remote / name).clear()
        self._ended = True
        self.store.sweep()


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
    try:
        store = OutputStore(Folder(config.output, RetryPolicy(config.storage_retry_seconds)), config.cache)
        store.cache_dir.mkdir(parents=True, exist_ok=True)
    except UsageError as error:
        raise ConfigError("prepare", [f"cache: {error}"]) from error
    except OSError as error:
        problem = f"cache = {config.cache}: {error.strerror}; name a folder of this host that can be written"
        raise ConfigError("prepare", [problem]) from error
    for left in store.cache_dir.glob("command-*"):
        # Of a killed command, whose lock the kernel has released.
        with contextlib.suppress(OSError), (left / _HELD).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix="command-", dir=store.cache_dir) as name,
        Path(name, _HELD).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = StoredOutput(config, store, Path(name))
        output.refresh()
        yield output
    with contextlib.suppress(OSError):  # other files of this output are left
        store.cache_dir.rmdir()
