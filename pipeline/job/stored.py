"""The output of a preparation in an object store, and the opening of an output in either place.

The store is all that the command and its tasks on any host share. It has the layout of an output folder. An object
store has no rename, so a list of the files of a unit, with their checksums, is written after them
(`sent/STAGE/UNIT.json`). A unit without such a list, or whose files do not have the sizes in it, is not finished. The
whole output is complete when `.files.json` exists, which is written last, after the manifest
(src/declutr/common/stores/folder.py); `sent/` and `candidates/` are removed then.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from declutr.pipeline.job.units import Unit, matching_sidecar
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Sidecar

_SENT = "sent"  # folder in the output for the lists of finished units
_SHARED = ("shared", "files")  # key of the files that all units share, among those of (stage, unit)
_SINGLE = (PLAN, PROGRESS, DUPLICATES, MANIFEST)  # files of the command itself, the manifest last
_OF_UNIT = re.compile(r"(?:train-|held-out-|ledger/|rejected/|units/)(\d{5,})\.(?:arrow|jsonl\.gz|json)")
_HELD, _COPIES, _TASKS = ".held", "copies", "tasks"
_THREADS = 16
_SWEEP_SECONDS = 30.0


@dataclass(frozen=True)
class OutputStore:
    """The address of an output, and the folder for its files on each host, as tasks get them.

    Every method raises RemoteError if the store refuses, or did not answer within `storage_retry_seconds`.
    """

    remote: Folder
    cache: str
    """`cache` of the configuration; each host expands it."""

    @property
    def cache_dir(self) -> Path:
        """Folder of this host for files of this output."""
        return expand(self.cache).absolute() / short_name(self.remote.url)

    def send(self, stage: str, unit: str, folder: Path, names: Sequence[str]) -> Files:
        """Sends the files of a finished unit, then their list."""
        sent = self.remote.put_all(folder, names)
        # Last: a store has no rename, so the list makes the files count.
        self.remote.put(f"{_SENT}/{stage}/{unit}.json", encoded(sent))
        return sent

    def send_written(self, stage: str, unit: str, folder: Path, fetched: Mapping[str, FileRecord]) -> Files:
        """Sends what a task has written to its staging folder."""
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        return self.send(
            stage, unit, folder, sorted({path.relative_to(folder).as_posix() for path in files} - fetched.keys())
        )

    def host_keys(self, files: Files) -> Path:
        """This host's copy of the keys of all units, by name in the candidates; fetched at the first use.

        Raises:
            AlteredError: a file is missing or altered.
        """
        return (self.remote / CANDIDATES).cached(self.cache_dir / _COPIES, files)

    @contextlib.contextmanager
    def staging_dir(self, shared: Mapping[str, FileRecord], own: Mapping[str, FileRecord]) -> Iterator[Path]:
        """A temporary folder of this host with the layout of an output folder, for one task.

        Args:
            shared: files that all tasks need; a host fetches them once.
            own: files that this task needs.
        """
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
        left = [
            # No CPU, because other work may hold all of them.
            task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(self)
            for node in nodes
        ]
        _sweep(self)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_SWEEP_SECONDS)


def _sweep(store: OutputStore) -> None:
    for name in (_COPIES, _TASKS):
        shutil.rmtree(store.cache_dir / name, ignore_errors=True)


class StoredOutput(Output):
    """An output in an object store. `folder` is temporary: a command starts from what the store has.

    Every method raises RemoteError if the store refuses, or did not answer in time.
    """

    def __init__(self, store: OutputStore, folder: Path, duplicates: DuplicatesConfig, session: SessionConfig) -> None:
        if session == SessionConfig() and "RAY_ADDRESS" not in os.environ:
            session = SessionConfig(address=started_cluster())  # the cluster of this host: no host's disk matters
        super().__init__(store.remote.url, folder, duplicates, session)
        self.store, self.remote, self.name = store, store.remote, store.remote.url
        self._sizes: dict[str, int] = {}
        self._files: dict[tuple[str, str], Files] = {}
        """Files of finished units by stage and unit."""
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
        """Keeps other commands away from the address; `lost` is called if one has taken it over.

        Raises:
            RunLockedError: another command holds the address.
        """
        with StoreLock(self.remote, lost):
            yield

    def refresh(self) -> None:
        """Fetches the small files of the output: plan, tokenizer, sidecars of finished units.

        Raises:
            AlteredError: a list is damaged.
        """
        self._sizes, self._files = self.remote.sizes(), {}
        lists = [name for name in self._sizes if name.startswith(f"{_SENT}/")]
        with ThreadPoolExecutor(_THREADS) as pool:  # one small object a unit, and each request waits for the network
            for name, raw in zip(lists, pool.map(self.remote.read, lists), strict=True):
                files = decoded(raw, self.remote.at(name)) if raw else {}
                if files and self._has(files):
                    self._files[Path(name).parent.name, Path(name).stem] = files
        self._listing = self.remote.listing() if LISTING in self._sizes else None
        for key, files in self._listed_units():
            if self._has(files):
                self._files.setdefault(key, files)
        for name in _SINGLE:
            if name == DUPLICATES and (self.folder / name).exists():  # it never changes, and may be large
                continue
            if name in self._sizes and (name != MANIFEST or self._listing is not None):
                self.remote.pull(name, self.folder / name)
        missing = {
            name: record
            for key, files in self._files.items()
            for name, record in files.items()
            if key == _SHARED or Path(name).parent.name == "units"
            if not (self.folder / name).exists() or record_of(self.folder / name) != record
        }
        self.remote.fetch_all(missing, self.folder)

    def _listed_units(self) -> list[tuple[tuple[str, str], Files]]:
        """The files of a complete output by stage and unit, because `sent/` is removed when it is complete."""
        units: dict[tuple[str, str], Files] = {}
        for name, record in (self._listing or {}).items():
            if match := _OF_UNIT.fullmatch(name):
                units.setdefault((self._last_stage(), match[1]), {})[name] = record
            elif name == INDEX or name.startswith(f"{TOKENIZER}/"):
                units.setdefault(_SHARED, {})[name] = record
        return list(units.items())

    def _last_stage(self) -> str:
        return "select" if self.duplicates.enabled else "prepare"

    def write_plan(self, plan: PreparePlan) -> None:
        """Sends the plan unless the store has one."""
        super().write_plan(plan)
        if PLAN not in self._sizes:
            self.remote.put(PLAN, self.folder / PLAN)

    def share(self) -> None:
        """Sends the tokenizer and the index of evaluation sets, unless the store has them."""
        names = [path.relative_to(self.folder).as_posix() for path in sorted((self.folder / TOKENIZER).glob("*"))]
        names += [INDEX] if (self.folder / INDEX).exists() else []
        if _SHARED not in self._files:
            self._files[_SHARED] = self.store.send(*_SHARED, self.folder, names)

    def finished_sidecar(self, unit: Unit, stage: Stage, settings_hash: str) -> Sidecar | None:
        """The sidecar of a unit that a stage has finished; `refresh` fetches only sidecars of units with all files."""
        return matching_sidecar(unit, self.stage_folder(stage), settings_hash)

    def add(self, stage: str, unit: str, files: Files) -> None:
        """Records the files of a unit that a task has sent."""
        self._files[stage, unit] = files

    def shared_files(self, stage: str) -> Files:
        """The tokenizer and the index of evaluation sets; to select, also the list of duplicates."""
        select = {DUPLICATES: record_of(self.folder / DUPLICATES)} if stage == "select" else {}
        return self._files[_SHARED] | select

    def files_of(self, stage: str, unit: str) -> Files:
        """The candidates of a unit, to select from."""
        return self._files["prepare", unit] if stage == "select" else {}

    def find_duplicates(self, units: list[str], labels: list[str] | None) -> None:
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
        host_keys = partial(self.store.host_keys, names)
        table = find_duplicates(host_keys(), units, self.duplicates, self.session, host_keys, labels)
        table.replace(self.folder / DUPLICATES)
        self.remote.put(DUPLICATES, self.folder / DUPLICATES)

    def complete(self) -> None:
        """Sends the manifest and then the list of all files, and removes what only the work needed."""
        last = (self._last_stage(), _SHARED[0])
        files = {name: record for key, sent in self._files.items() if key[0] in last for name, record in sent.items()}
        files |= self.remote.put_all(self.folder, [name for name in _SINGLE if (self.folder / name).is_file()])
        self.remote.commit(dict(sorted(files.items())))
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
        for name, kind in self.remote.kinds().items():
            if kind == "file" and name not in ("", LOCK):
                self.remote.delete(name)
            elif kind != "file" and name:
                (self.remote / name).clear()
        self.store.sweep()


@contextlib.contextmanager
def open_output(config: PipelineConfig) -> Iterator[Output]:
    """The output that the settings give, for one command.

    Raises:
        RemoteError: the store refuses, or did not answer in time.
        ConfigError: `cache` cannot be written.
    """
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
        output = StoredOutput(store, Path(name), config.duplicates, config.session)
        output.refresh()
        yield output
    with contextlib.suppress(OSError):  # other files of this output are left
        store.cache_dir.rmdir()
