"""An output in an object store, as the command and its tasks on any host use it: the store is all that they share.

The store has the layout of an output folder. An object store has no rename, so a list of the files of a unit, with
their checksums, is written after them (`sent/STAGE/UNIT.json`). A unit without such a list, or whose files do not have
the sizes in it, is not finished. The whole output is complete when `.files.json` exists, which is written last, after
the manifest (src/declutr/common/stores/folder.py); `sent/` and `candidates/` are removed then.
"""

import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from declutr.pipeline.job.progress import HEARTBEATS
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from declutr.common.paths import expand
from declutr.common.storage import FileRecord, Files, decoded, encoded
from declutr.common.stores.address import is_remote, short_name
from declutr.common.stores.folder import Folder
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.units import Unit
from declutr.pipeline.shards.manifest import TOKENIZER

SENT = "sent"
"""Folder in the output for the lists of finished units."""
_OF_UNIT = re.compile(r"(?:train-|held-out-|ledger/|rejected/|units/)(\d{5,})\.(?:arrow|jsonl\.gz|json)")
SHARED = ("shared", "files")
"""Place of the files that all units share, among those of units."""
_COPIES, _TASKS = "copies", "tasks"
_THREADS = 16
_SWEEP_SECONDS = 30.0


@dataclass(frozen=True)
class OutputStore:
    """The address of an output, and the folder for its files on each host.

    Every method raises RemoteError if the store refuses, or did not answer within `storage_retry_seconds`.
    """

    remote: Folder
    cache: str
    """`cache` of the configuration; each host expands it."""

    @property
    def cache_dir(self) -> Path:
        """Folder of this host for files of this output."""
        return expand(self.cache).absolute() / short_name(self.remote.url)

    @property
    def copies(self) -> str:
        """Folder for the files that the tasks of a host share; each host expands it."""
        return f"{self.cache}/{short_name(self.remote.url)}/{_COPIES}"

    def send_finished(self, stage: str, unit: str, folder: Path, names: Sequence[str]) -> Files:
        """Sends the files of a finished unit, then their list."""
        sent = self.remote.put_all(folder, names)
        self.remote.put(f"{SENT}/{stage}/{unit}.json", encoded(sent))
        return sent

    def finished(self) -> tuple[dict[str, int], dict[tuple[str, str], Files]]:
        """Sizes of everything at the address, and the files of all finished units by stage and unit.

        Raises:
            AlteredError: a list is damaged.
        """
        there = self.remote.sizes()
        lists = [name for name in there if name.startswith(f"{SENT}/")]
        finished = {}
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, raw in zip(lists, pool.map(self.remote.read, lists), strict=True):
                files = decoded(raw, self.remote.at(name)) if raw else {}
                if files and holds(there, files):
                    finished[Path(name).parent.name, Path(name).stem] = files
        return there, finished

    @contextmanager
    def staging_dir(
        self, shared: Mapping[str, FileRecord], own: Mapping[str, FileRecord], heartbeats: Path
    ) -> Iterator[Path]:
        """A temporary folder of this host with the layout of an output folder, for one task.

        Args:
            shared: files that all tasks need; a host fetches them once.
            own: files that this task needs.
            heartbeats: folder for heartbeats, which exists on the host of the command only.
        """
        copy = self.remote.cached(self.cache_dir / _COPIES, shared)
        (self.cache_dir / _TASKS).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache_dir / _TASKS) as name:
            folder = Path(name)
            for path in copy.iterdir():
                (folder / path.name).symlink_to(path)
            if heartbeats.parent.is_dir():
                heartbeats.mkdir(exist_ok=True)
                (folder / heartbeats.name).symlink_to(heartbeats)
            self.remote.fetch_all(own, folder)
            yield folder

    def sweep(self) -> None:
        """Removes this output's files from all hosts of the session, as far as they answer; they are only copies."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
        task = ray.remote(_sweep)
        left = [
            task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(self)
            for node in nodes
        ]
        _sweep(self)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_SWEEP_SECONDS)


def _sweep(store: OutputStore) -> None:
    for name in (_COPIES, _TASKS):
        shutil.rmtree(store.cache_dir / name, ignore_errors=True)


def holds(there: Mapping[str, int], files: Mapping[str, FileRecord]) -> bool:
    """Returns True if all files have the size of their record."""
    return all(there.get(name) == record.num_bytes for name, record in files.items())


def units_in(listing: Mapping[str, FileRecord], stage: str) -> list[tuple[tuple[str, str], Files]]:
    """The files of a complete output, by unit; those that all units share are one more."""
    units: dict[tuple[str, str], Files] = {}
    for name, record in listing.items():
        if match := _OF_UNIT.fullmatch(name):
            units.setdefault((stage, match[1]), {})[name] = record
        elif name == INDEX or name.startswith(f"{TOKENIZER}/"):
            units.setdefault(SHARED, {})[name] = record
    return list(units.items())


def made_in(folder: Path, needs: Mapping[str, FileRecord]) -> list[str]:
    """Names of the files that a task has made in its staging folder, the sidecar last."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = {path.relative_to(folder).as_posix() for path in files} - needs.keys()
    return sorted(
        (name for name in names if not name.startswith(f"{HEARTBEATS}/")), key=lambda name: ("units/" in name, name)
    )


def refuse_missing(unit: Unit) -> None:
    """Checks that this host sees the local inputs that the command saw; otherwise they would count as failed.

    Raises:
        FileNotFoundError: it does not.
    """
    for part in unit.parts:
        if unit.file_states.get(part.path) and not is_remote(part.path) and not Path(part.path).exists():
            raise FileNotFoundError(
                f"{part.path} is not on host {socket.gethostname()}; put the corpus into a folder that all hosts see, "
                "or into an object store, and name it in corpus.paths"
            )
