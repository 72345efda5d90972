"""The output of a preparation in a folder that all hosts see: its plan and its finished work."""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from declutr.common.cluster import SessionConfig
from declutr.common.config import Strict
from declutr.common.lock import LOCK, RunLock
from declutr.common.storage import Files, fsync_path, write_text
from declutr.common.stores.copies import PLAN
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys, identity
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.filters.document_filter import fingerprints
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.output_store import OutputStore
from declutr.pipeline.job.progress import HEARTBEATS, PROGRESS
from declutr.pipeline.job.unit_writer import finished_sidecar
from declutr.pipeline.job.units import Unit, hash_unit
from declutr.pipeline.job.worker import CANDIDATES, stage_folder
from declutr.pipeline.readers.input_state import InputState
from declutr.pipeline.readers.skipped import Skip
from declutr.pipeline.shards.ledger import LEDGERS, REJECTED
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Sidecar
from declutr.pipeline.shards.shards import check_shards


class PreparePlan(Strict):
    """Settings and inputs of an output folder, written first so that a later run can check them."""

    config: dict[str, Any]
    config_hash: str
    units: dict[str, str]
    """Hash of each unit's inputs, by unit name."""
    files: dict[str, str]
    """Hash of other files that influence the choice, by setting."""
    sources: dict[str, str]
    """First source of each unit, by unit name, for messages on changed inputs."""
    input_states: dict[str, InputState]
    """State of each unit's inputs, by unit name."""
    skipped: dict[str, Skip] = Field(default_factory=dict)
    """Skipped files, by kind; without influence on whether a folder can be continued."""


def plan_of(config: PipelineConfig, units: Sequence[Unit], skipped: dict[str, Skip] | None = None) -> PreparePlan:
    """The plan of these settings over these inputs."""
    return PreparePlan(
        config=identity(config),
        config_hash=config_hash(config),
        units={unit.name: hash_unit(unit) for unit in units},
        files=fingerprints(config.filters),
        sources={unit.name: unit.parts[0].source for unit in units},
        input_states={unit.name: unit.input_state for unit in units if unit.input_state},
        skipped=skipped or {},
    )


def write_plan(folder: Path, plan: PreparePlan) -> None:
    """Writes the plan to the folder and removes temporary files of a killed run."""
    if not (folder / PLAN).exists():
        write_text(folder / PLAN, plan.model_dump_json(indent=1) + "\n")
    for aside in list(folder.rglob(".*.tmp")):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def output_problems(folder: Path, names: Collection[str], config: PipelineConfig, plan: PreparePlan) -> list[str]:
    """Reasons why an output cannot be used for this plan, one line each; none if it is new or has this plan.

    Args:
        folder: the output folder; for an address, a folder with the plan that was found there.
        names: names of the files and folders in the output.
        config: settings.
        plan: plan of these settings.
    """
    where = f"output = {config.output!r}"
    if folder.exists() and not folder.is_dir():
        return [f"{where} is a file; name a folder"]
    if all(name.startswith(".") or name in ("", LOCK) for name in names):
        return []
    try:
        other = PreparePlan.model_validate_json((folder / PLAN).read_bytes())
    except FileNotFoundError:
        return [f"{where} holds files that `prepare` did not write; name an empty or a new folder"]
    except ValidationError:
        return [f"{where}: its {PLAN} is of another version; name another folder or delete this one"]
    if other.config_hash != plan.config_hash:
        differing = "; ".join(differing_keys(config, other.config))
        return [f"{where} was made with other settings ({differing}); name another folder or delete this one"]
    if other.files != plan.files:
        changed = sorted(key for key in plan.files if plan.files[key] != other.files.get(key))
        return [f"{where} was made with other contents of the files of {', '.join(changed)}; name another folder"]
    # Installed packages change often; documentation prepared from earlier versions stays valid.
    if plan.units == other.units or (config.corpus.kind == "python_docs" and (folder / MANIFEST).exists()):
        return []
    changed = sorted(
        name for name in plan.units.keys() | other.units.keys() if plan.units.get(name) != other.units.get(name)
    )
    first = plan.sources.get(changed[0]) or other.sources[changed[0]]
    return [
        f"{where} was started with other inputs: {len(changed)} of {len(plan.units)} units changed, the first at "
        f"{first}; name another folder or delete this one"
    ]


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
    def session(self) -> SessionConfig:
        """The place where the tasks run."""
        return self.config.session

    def names(self) -> list[str]:
        """Names of the files and folders in the output."""
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    def is_complete(self) -> bool:
        """Returns True if the output has a manifest and everything that it names."""
        whole = (self.folder / MANIFEST).exists() and not check_shards(self.folder)
        if whole:  # a stop may have left what `complete` removes
            self.complete()
        return whole

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
            ShardError: a file of keys is missing, damaged, or was written with other settings.
        """
        duplicates = find_duplicates(
            self.folder / CANDIDATES, units, self.config.duplicates, self.session, labels=labels
        )
        self._keep(duplicates)

    def _keep(self, duplicates: Path) -> None:
        duplicates.replace(self.folder / DUPLICATES)
        fsync_path(self.folder)

    def complete(self) -> None:
        """Ends the work after the manifest was written."""
        shutil.rmtree(self.folder / CANDIDATES, ignore_errors=True)

    def discard(self) -> None:
        """Removes everything that a preparation wrote, except its lock."""
        for name in (TOKENIZER, "units", LEDGERS, REJECTED, CANDIDATES, HEARTBEATS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for path in [*self.folder.glob("train-*.arrow"), *self.folder.glob("held-out-*.arrow")]:
            path.unlink()
        for name in (MANIFEST, PROGRESS, PLAN, INDEX, DUPLICATES):
            (self.folder / name).unlink(missing_ok=True)
