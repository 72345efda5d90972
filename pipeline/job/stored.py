"""The output of a preparation in an object store, and the opening of an output in either place.

The store is all that the command and its tasks on any host share. It has the layout of an output folder. An object
store has no rename, so the sidecar of a unit, which lists its files with their checksums, is sent after them. A unit
without a sidecar, or whose files do not have the sizes in it, is not finished. The whole output is complete when
`.files.json` exists, which is written last, after the manifest (src/declutr/common/stores/folder.py); `sent/`, with the
list of the files that all units share, and `candidates/` are removed then.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from declutr.common.cluster import SessionConfig, started_cluster
from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, UsageError
from declutr.common.lock import LOCK, StoreLock
from declutr.common.paths import expand
from declutr.common.storage import LISTING, FileRecord, Files, decoded, encoded, record_of
from declutr.common.stores.address import is_remote, short_name
from declutr.common.stores.copies import PLAN
from declutr.common.stores.folder import Folder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.pairs import DUPLICATES
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.output import PROGRESS, Output, PreparePlan, Stage
from declutr.pipeline.job.units import UNITS, Unit, load_sidecar, matching_sidecar, sidecar_path, write_sidecar
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.shards.ledger import LedgerFile
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Shard, Sidecar

_SENT = "sent"
_SHARED = f"{_SENT}/shared/files.json"  # list of the files of the tokenizer and of the index of evaluation sets
_SINGLE = (PLAN, PROGRESS, DUPLICATES, MANIFEST)  # files of the command itself, the manifest last
_HELD = ".held"  # file in the temporary folder of a command, locked while the command runs
_COPIES = "copies"  # folder in the cache for files that all tasks of a host share
_TASKS = "tasks"  # folder in the cache for one temporary folder a task
_SWEEP_SECONDS = 30.0  # longest wait for the other hosts to remove their files


@dataclass(frozen=True)
class OutputStore:
    """The address of an output, and the folder for its files on each host, as tasks get them.

    Every method raises RemoteError if the store refuses, or did not answer within `storage_retry_seconds`.
    """

    remote: Folder
    cache: str  # `cache` of the configuration; each host expands it

    @property
    def cache_dir(self) -> Path:
        """Folder of this host for files of this output."""
        return expand(self.cache).absolute() / short_name(self.remote.url)

    def send_written(self, folder: Path, fetched: Mapping[str, FileRecord]) -> None:
        """Sends what a task has written to its staging folder, the sidecar last."""
        # Links lead to shared files.
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        names = {path.relative_to(folder).as_posix() for path in files} - fetched.keys()  # the store has those
        # A store has no rename, so the sidecar makes the other files count.
        for name in sorted(names, key=lambda name: (Path(name).parent.name == UNITS, name)):
            self.remote.put(name, folder / name)

    def host_keys(self, files: Files) -> Path:
        """This host's copy of the keys of all units, by name in the candidates; fetched at the first use."""
        return (self.remote / CANDIDATES).cached(self.cache_dir / _COPIES, files)

    @contextlib.contextmanager
    def staging_dir(
        self,
        shared: Mapping[str, FileRecord],  # files that all tasks need; a host fetches them once
        own: Mapping[str, FileRecord],  # files that this task needs
    ) -> Iterator[Path]:
        """A temporary folder of this host with the layout of an output folder, for one task."""
        copy = self.remote.cached(self.cache_dir / _COPIES, shared)
        (self.cache_dir / _TASKS).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache_dir / _TASKS) as name:
            folder = Path(name)
            for path in copy.iterdir():
                (folder / path.name).symlink_to(path)  # a link, because the shared files may be large
            self.remote.fetch_all(own, folder)
            yield folder

    def sweep(self) -> None:
        """Removes this output's files from all hosts of the session, as far as they answer; they are only copies."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
        task = ray.remote(_sweep)
        removals = [
            # No CPU, because other work may hold all of them.
            task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(self)
            for node in nodes
        ]
        _sweep(self)
        if removals:
            ray.wait(removals, num_returns=len(removals), timeout=_SWEEP_SECONDS)


def _sweep(store: OutputStore) -> None:
    for name in (_COPIES, _TASKS):
        shutil.rmtree(store.cache_dir / name, ignore_errors=True)


class StoredOutput(Output):
    """An output in a store, from what it has in a temporary `folder`; RemoteError if it refuses, or does not answer."""

    def __init__(self, store: OutputStore, folder: Path, duplicates: DuplicatesConfig, session: SessionConfig) -> None:
        if session == SessionConfig() and "RAY_ADDRESS" not in os.environ:
            session = SessionConfig(address=started_cluster())  # this host's cluster: its hosts need no common disk
        super().__init__(store.remote.url, folder, duplicates, session)
        self.store, self.remote, self.name = store, store.remote, store.remote.url
        self._sizes: dict[str, int] = {}
        self._shared: Files = {}  # the tokenizer and the index of evaluation sets
        self._listing: Files | None = None

    def names(self) -> list[str]:
        """Names of the files and folders at the address."""
        return sorted({name.partition("/")[0] for name in self._sizes})

    def is_complete(self) -> bool:
        """Returns True if the output has the list of its files, and they have the sizes in it."""
        if self._listing is None or not self._has(self._listing):
            return False
        if {CANDIDATES, _SENT} & set(self.names()):  # the command that wrote the list was killed
            with contextlib.suppress(OSError):
                self._clear()
        return True

    def _has(self, files: Files) -> bool:
        """Returns True if the store has these files with these sizes."""
        return all(self._sizes.get(name) == record.num_bytes for name, record in files.items())

    @contextlib.contextmanager
    def owned(self, lost: Callable[[], None]) -> Iterator[None]:
        """Keeps other commands away from the address; `lost` is called if one has taken it over."""
        with StoreLock(self.remote, lost):
            yield

    def refresh(self) -> None:
        """Fetches the small files of the output: plan, tokenizer, sidecars of finished units."""
        self._sizes = self.remote.sizes()
        self._listing = self.remote.listing() if LISTING in self._sizes else None
        shared = self._listing or {}
        raw = self.remote.read(_SHARED) if _SHARED in self._sizes else None
        if raw:
            shared = decoded(raw, self.remote.at(_SHARED))
        shared = {name: shared[name] for name in shared if name == INDEX or name.startswith(f"{TOKENIZER}/")}
        self._shared = shared if self._has(shared) else {}
        small = {name for name in self._sizes if name in _SINGLE or Path(name).parent.name == UNITS}
        small -= {DUPLICATES} if (self.folder / DUPLICATES).exists() else set()  # it never changes, and may be large
        # A manifest does not count before the list of files, which is sent after it.
        small -= {MANIFEST} if self._listing is None else set()
        missing = dict[str, FileRecord | None](dict.fromkeys(small))
        for name, record in self._shared.items():
            if not (self.folder / name).exists() or record_of(self.folder / name) != record:
                missing[name] = record
        self.remote.fetch_all(missing, self.folder)

    def write_plan(self, plan: PreparePlan) -> None:
        """Sends the plan unless the store has one."""
        super().write_plan(plan)
        if PLAN not in self._sizes:
            self.remote.put(PLAN, self.folder / PLAN)

    def share(self) -> None:
        """Sends the tokenizer and the index of evaluation sets, unless the store has them."""
        names = [path.relative_to(self.folder).as_posix() for path in sorted((self.folder / TOKENIZER).glob("*"))]
        names += [INDEX] if (self.folder / INDEX).exists() else []
        if not self._shared:
            self._shared = self.remote.put_all(self.folder, names)
            self.remote.put(_SHARED, encoded(self._shared))

    def finished_sidecar(self, unit: Unit, stage: Stage, settings_hash: str) -> Sidecar | None:
        """The sidecar of a unit that a stage has finished: same input, same settings, all files present; else None."""
        sidecar = matching_sidecar(unit, self.stage_folder(stage), settings_hash)
        if sidecar is None or sidecar.others is None:  # a sidecar of an earlier version does not name all files
            return None
        return sidecar if self._has(self._files_of(stage, sidecar)) else None

    def add(self, stage: Stage, sidecar: Sidecar) -> None:
        """Records a unit whose files a task has sent."""
        write_sidecar(self.stage_folder(stage), sidecar)

    def shared_files(self, stage: Stage) -> Files:
        """The tokenizer and the index of evaluation sets; to select, also the list of duplicates."""
        select = {DUPLICATES: record_of(self.folder / DUPLICATES)} if stage == "select" else {}
        return self._shared | select

    def needed_files(self, stage: Stage, unit: str) -> Files:
        """The candidates of a unit, to select from."""
        sidecar = load_sidecar(self.folder / CANDIDATES, unit) if stage == "select" else None
        return self._files_of("prepare", sidecar) if sidecar else {}

    def _files_of(self, stage: Stage, sidecar: Sidecar) -> Files:
        """The files of a unit by name in the output."""
        folder = self.stage_folder(stage)
        main: list[Shard | LedgerFile] = [*sidecar.shards, sidecar.ledger]
        files = {file.name: FileRecord(file.sha256, file.num_bytes) for file in main}
        files |= {name: FileRecord(*facts) for name, facts in (sidecar.others or {}).items()}
        files[f"{UNITS}/{sidecar.unit}.json"] = record_of(sidecar_path(folder, sidecar.unit))
        return {(folder / name).relative_to(self.folder).as_posix(): record for name, record in files.items()}

    def find_duplicates(self, units: list[str], labels: list[str] | None) -> None:
        """Searches for duplicates among the candidates of all units, with a copy of their keys on each host."""
        names = {
            name.removeprefix(f"{CANDIDATES}/"): record
            for unit in units
            for name, record in self.needed_files("select", unit).items()
            if name.startswith(f"{CANDIDATES}/keys/")
        }
        host_keys = partial(self.store.host_keys, names)
        table = find_duplicates(host_keys(), units, self.duplicates, self.session, host_keys, labels)
        table.replace(self.folder / DUPLICATES)
        self.remote.put(DUPLICATES, self.folder / DUPLICATES)

    def complete(self) -> None:
        """Sends the manifest and then the list of all files, and removes what only the work needed."""
        files = (self._listing or {}) | self._shared
        for path in (self.folder / UNITS).iterdir():
            files |= self._files_of("select", Sidecar.model_validate_json(path.read_bytes()))
        files |= self.remote.put_all(self.folder, [name for name in _SINGLE if (self.folder / name).is_file()])
        self.remote.commit(dict(sorted(files.items())))  # sorted, as iterdir has the file system's order
        try:
            self._clear()
            self.store.sweep()
        except OSError as error:
            get_logger().warning("%s is complete; what only the work needed could not be removed: %s", self.name, error)

    def _clear(self) -> None:
        for name in (CANDIDATES, _SENT):
            (self.remote / name).clear()

    def discard(self) -> None:
        """Removes everything at the address, except the lock; a plan at the address shows that it is ours."""
        for name, kind in sorted(self.remote.kinds().items(), key=lambda entry: entry[0] == PLAN):  # the plan last
            if kind == "file" and name not in ("", LOCK):
                self.remote.delete(name)
            elif kind != "file" and name:
                (self.remote / name).clear()
        self.store.sweep()


@contextlib.contextmanager
def open_output(config: PipelineConfig) -> Iterator[Output]:
    """The output that the settings give, for one command."""
    if not is_remote(config.output):
        yield Output(config.output, expand(config.output).absolute(), config.duplicates, config.session)
        return
    try:
        store = OutputStore(Folder(config.output, config.storage_retry_seconds), config.cache)
        store.cache_dir.mkdir(parents=True, exist_ok=True)
    except UsageError as error:
        raise ConfigError("prepare", [f"cache: {error}"]) from error
    except OSError as error:
        problem = f"cache = {config.cache}: {error.strerror}; name a folder of this host that can be written"
        raise ConfigError("prepare", [problem]) from error
    for folder in store.cache_dir.glob("command-*"):
        # The kernel has released the lock of a killed command.
        with contextlib.suppress(OSError), (folder / _HELD).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while the folder's command runs
            shutil.rmtree(folder, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix="command-", dir=store.cache_dir) as name,
        Path(name, _HELD).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = StoredOutput(store, Path(name), config.duplicates, config.session)
        output.refresh()
        yield output
    with contextlib.suppress(OSError):  # raised while the folder has other files of this output
        store.cache_dir.rmdir()
