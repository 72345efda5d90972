"""The output of a preparation while a command works on it: a folder that all hosts see."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from declutr.common.lock import RunLock
from declutr.common.session_config import SessionConfig
from declutr.common.storage import fsync_path
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.job.estimate import ESTIMATE
from declutr.pipeline.job.output import PreparePlan, discard, write_plan
from declutr.pipeline.job.output_store import Files, OutputStore
from declutr.pipeline.job.unit_writer import finished_sidecar
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import CANDIDATES, stage_folder
from declutr.pipeline.shards.manifest import MANIFEST, Sidecar
from declutr.pipeline.shards.shards import check_shards


class Output:
    """An output folder; `StoredOutput` is one in an object store.

    Attributes:
        config: settings.
        folder: the folder; for an address, a folder of this host with the small files of the output.
        store: None for a folder.
    """

    store: OutputStore | None = None

    def __init__(self, config: PipelineConfig, folder: Path) -> None:
        self.config, self.folder = config, folder

    @property
    def name(self) -> str:
        """The output in messages."""
        return str(self.folder)

    @property
    def estimate_path(self) -> Path:
        """Path of the estimate of `--plan`, next to the folder."""
        return self.folder.with_name(f"{self.folder.name}.{ESTIMATE}")

    @property
    def session(self) -> SessionConfig:
        """The place where the tasks run."""
        return self.config.session

    def names(self) -> list[str]:
        """Names of the files and folders in the output."""
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    def is_complete(self) -> bool:
        """Returns True if the output has a manifest and everything that it names."""
        return (self.folder / MANIFEST).exists() and not check_shards(self.folder)

    @contextmanager
    def owned(self, lost: Callable[[], None]) -> Iterator[None]:
        """Keeps other commands away from the output; `lost` is called if one has taken it over.

        Raises:
            RunLockedError: another command holds the output.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with RunLock(self.folder, lost):
                yield
        finally:
            if self.folder.is_dir() and not any(self.folder.iterdir()):  # one renamed meanwhile must not hide the error
                self.folder.rmdir()

    def refresh(self) -> None:
        """Looks at the output again; other commands may have worked on it."""

    def write_plan(self, plan: PreparePlan) -> None:
        """Writes the plan unless it exists."""
        write_plan(self.folder, plan)

    def share(self) -> None:
        """Makes the tokenizer and the index of evaluation sets readable for all hosts."""

    def finished_sidecar(self, unit: Unit, stage: str) -> Sidecar | None:
        """The sidecar of a unit that a stage has finished: same input, same settings, all files present; else None."""
        return finished_sidecar(unit, self.target(stage), self.config)

    def target(self, stage: str) -> Path:
        """Folder of a stage."""
        return stage_folder(self.folder, self.config) if stage == "prepare" else self.folder

    def note(self, stage: str, unit: str, files: Files) -> None:
        """Notes the files of a unit that was just finished."""

    def shared_files(self, stage: str) -> Files:  # noqa: ARG002
        """Files that all tasks of a stage fetch."""
        return {}

    def files_of(self, stage: str, unit: str) -> Files:  # noqa: ARG002
        """Files that a stage's task on this unit fetches."""
        return {}

    def find_duplicates(self, units: list[str], labels: list[str] | None = None) -> None:
        """Searches for duplicates among the candidates of all units; records the labels whose rows are kept.

        Raises:
            KeysError: a file of keys is missing, damaged, or was written with other settings.
        """
        found = find_duplicates(self.folder / CANDIDATES, units, self.config.duplicates, self.session, labels=labels)
        self._keep(found)

    def _keep(self, duplicates: Path) -> None:
        duplicates.replace(self.folder / DUPLICATES)
        fsync_path(self.folder)

    def complete(self) -> None:
        """Ends the work after the manifest was written."""
        shutil.rmtree(self.folder / CANDIDATES, ignore_errors=True)

    def discard(self) -> None:
        """Removes everything that a preparation wrote, except its lock."""
        discard(self.folder)
