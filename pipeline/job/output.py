"""The output of a preparation in a folder that all hosts see: plan, finished work, reasons not to continue it.

`Preparation` is what a command does, planned once from the settings and the inputs. All tasks share the tokenizer,
loaded or trained on a sample of the corpus, and an index of evaluation sets.
"""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from declutr.common.cluster import SessionConfig
from declutr.common.config import Strict
from declutr.common.console.logs import get_logger
from declutr.common.lock import LOCK, RunLock
from declutr.common.storage import atomic_file, atomic_folder, fsync_path, write_text
from declutr.common.stores.address import is_remote
from declutr.common.stores.copies import PLAN
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys, identity
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.pairs import DUPLICATES
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.filters.document_filter import fingerprints, normalise
from declutr.pipeline.filters.evaluation_sets import INDEX, build_index
from declutr.pipeline.job.units import UNITS, Corpus, Unit, UnitReader, finished_sidecar, hash_unit, load_sidecar
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.readers.corpus import MIB
from declutr.pipeline.readers.input_state import InputState, digest_parts
from declutr.pipeline.readers.skipped import Skip
from declutr.pipeline.shards.content import AnyContent
from declutr.pipeline.shards.ledger import LEDGERS, REJECTED
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER, Sidecar
from declutr.pipeline.shards.shards import check_shards
from declutr.pipeline.texts import texts_of
from declutr.pipeline.tokenizer.batch_tokenizer import EngineName, choose_engine
from declutr.pipeline.tokenizer.tokenization import (
    TokenizerInfo,
    TrainedTokenizer,
    describe_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

HEARTBEATS = "heartbeats"
PROGRESS = "progress.jsonl"
Stage = Literal["prepare", "select"]
_COMPARISONS = 4  # units whose inputs are compared at a time
_SAMPLED_UNITS = 256
_COMPARED_MIB = 0.5  # text of the corpus on which tokenizer engines are compared


class PreparePlan(Strict):
    """Settings and inputs of an output folder, written first so that a later run can check them."""

    config: dict[str, Any]
    config_hash: str
    units: dict[str, str]  # hash of each unit's inputs, by unit name
    files: dict[str, str]  # hash of other files that influence the choice, by setting
    sources: dict[str, str]  # first source of each unit, by unit name, for messages on changed inputs
    input_states: dict[str, InputState]  # state of each unit's inputs, by unit name
    # Skipped files, by kind; without influence on whether a folder can be continued.
    skipped: dict[str, Skip] = Field(default_factory=dict)
    documents: bool = False  # True if the extra `documents` decides what is read


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
        documents=any(unit.reads_documents for unit in units),
    )


class Output:
    """An output folder; `StoredOutput` is one in an object store, whose `folder` holds small files on this host.

    `setting` is `output` of the configuration, `name` the output in messages; `duplicates` decides the stages.
    """

    def __init__(self, setting: str, folder: Path, duplicates: DuplicatesConfig, session: SessionConfig) -> None:
        self.setting, self.folder, self.duplicates, self.session = setting, folder, duplicates, session
        self.name = str(folder)

    def names(self) -> list[str]:
        """Names of the files and folders in the output."""
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    def is_complete(self) -> bool:
        """Returns True if the output has a manifest and everything in it, after removing leftovers of its work."""
        whole = (self.folder / MANIFEST).exists() and not check_shards(self.folder, tokenizer=True)
        if whole:  # a stop may have left what `complete` removes
            self.complete()
        return whole

    @contextmanager
    def owned(self, lost: Callable[[], None]) -> Iterator[None]:
        """Keeps other commands away from the output; `lost` is called if one has taken it over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with RunLock(self.folder, lost):
                yield
        finally:
            if self.folder.is_dir() and not any(self.folder.iterdir()):  # one renamed meanwhile must not hide the error
                self.folder.rmdir()

    def refresh(self) -> None:
        """Looks at the output again; other commands may have worked on it."""

    def problems(self, plan: PreparePlan) -> list[str]:
        """Reasons why the output cannot be used for a plan, one line each; none if it is new or has this plan."""
        folder, where = self.folder, f"output = {self.setting!r}"
        if folder.exists() and not folder.is_dir():
            return [f"{where} is a file; name a folder"]
        if all(name.startswith(".") or name in ("", LOCK) for name in self.names()):
            return []
        try:
            other = PreparePlan.model_validate_json((folder / PLAN).read_bytes())
        except FileNotFoundError:
            return [f"{where} holds files that `prepare` did not write; name an empty or a new folder"]
        except ValidationError:
            return [f"{where}: its {PLAN} is of another version; name another folder or delete this one"]
        if other.config_hash != plan.config_hash:
            differing = "; ".join(differing_keys(plan.config, other.config))
            return [f"{where} was made with other settings ({differing}); name another folder or delete this one"]
        if other.files != plan.files:  # a list of words or an evaluation set of the same name
            changed = sorted(key for key in plan.files if plan.files[key] != other.files.get(key))
            return [f"{where} was made with other contents of the files of {', '.join(changed)}; name another folder"]
        if plan.units == other.units or self._documentation_is_complete(plan):
            return []
        changed = sorted(
            name for name in plan.units.keys() | other.units.keys() if plan.units.get(name) != other.units.get(name)
        )
        first = plan.sources.get(changed[0]) or other.sources[changed[0]]
        first += " (the extra `documents` was installed or removed)" if plan.documents != other.documents else ""
        return [
            f"{where} was started with other inputs: {len(changed)} of {len(plan.units)} units changed, the first at "
            f"{first}; name another folder, delete this one, or prepare new files alone, as `data` takes a list"
        ]

    def input_problems(self, plan: PreparePlan, units: Sequence[Unit], verify: bool = False) -> list[str]:
        """Reasons why an output of the same plan cannot continue with the contents of these inputs.

        A changed time alone is not a change: if head, middle and tail of a file are the same, the whole file is read
        and compared with the recorded digest. `verify` reads every byte of files whose time is the same, too.
        """
        try:
            before = PreparePlan.model_validate_json((self.folder / PLAN).read_bytes()).input_states
        except (FileNotFoundError, ValidationError):
            return []
        if self._documentation_is_complete(plan):
            return []

        def compare(unit: Unit) -> str:
            for folder in (self.folder, self.folder / CANDIDATES):
                if (sidecar := load_sidecar(folder, unit.name)) and sidecar.input_state:
                    return _compare(unit, sidecar.input_state, verify)
            return _compare(unit, before.get(unit.name), verify)

        with ThreadPoolExecutor(_COMPARISONS) as pool:
            results = list(pool.map(compare, units))
        changed = [unit for unit, result in zip(units, results, strict=True) if result == "changed"]
        if changed:
            return [
                f"output = {self.setting!r} was started with other contents of its inputs: {len(changed)} of "
                f"{len(units)} units changed although names and sizes are the same, the first at "
                f"{changed[0].parts[0].source}; restore the earlier files, name another folder or delete this one"
            ]
        numbers, log = Counter(results), get_logger()
        if number := numbers["touched"]:
            log.info("%d of %d units: times differ, bytes are the same", number, len(units))
        if verify:
            log.info("%d of %d units: every byte is unchanged", numbers["verified"], len(units))
        if number := numbers["remote"]:
            log.warning("%d units: compared only by size and tag of remote files", number)
        return []

    def _documentation_is_complete(self, plan: PreparePlan) -> bool:
        """Returns True for complete documentation of Python packages, which stays valid when packages change."""
        return plan.config["corpus"]["kind"] == "python_docs" and (self.folder / MANIFEST).exists()

    def write_plan(self, plan: PreparePlan) -> None:
        """Writes the plan unless it exists, and removes temporary files of a killed run."""
        if not (self.folder / PLAN).exists():
            write_text(self.folder / PLAN, plan.model_dump_json(indent=1) + "\n")
        for aside in list(self.folder.rglob(".*.tmp")):
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink(missing_ok=True)

    def share(self) -> None:
        """Makes the tokenizer and the index of evaluation sets readable for all hosts."""

    def stage_folder(self, stage: Stage) -> Path:
        """Folder for the files of a stage."""
        return self.folder / CANDIDATES if stage == "prepare" and self.duplicates.enabled else self.folder

    def finished_sidecar(self, unit: Unit, stage: Stage, settings_hash: str) -> Sidecar | None:
        """The sidecar of a unit that a stage has finished: same input, same settings, all files present; else None."""
        return finished_sidecar(unit, self.stage_folder(stage), settings_hash)

    def find_duplicates(self, units: list[str], labels: list[str] | None) -> None:
        """Searches for duplicates among the candidates of all units; records the labels whose rows are kept."""
        table = find_duplicates(self.folder / CANDIDATES, units, self.duplicates, self.session, labels=labels)
        table.replace(self.folder / DUPLICATES)
        fsync_path(self.folder)  # or a power cut could undo the rename

    def complete(self) -> None:
        """Ends the work after the manifest was written."""
        shutil.rmtree(self.folder / CANDIDATES, ignore_errors=True)

    def discard(self) -> None:
        """Removes everything that a preparation wrote, except its lock."""
        # By name, because the folder may hold files of the user.
        folders = [self.folder / name for name in (TOKENIZER, UNITS, LEDGERS, REJECTED, CANDIDATES, HEARTBEATS)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for path in [*self.folder.glob("train-*.arrow"), *self.folder.glob("held-out-*.arrow")]:
            path.unlink()
        for name in (MANIFEST, PROGRESS, INDEX, DUPLICATES):
            (self.folder / name).unlink(missing_ok=True)
        if not any(map(os.path.lexists, folders)):  # files without a plan are refused as those of somebody else
            (self.folder / PLAN).unlink(missing_ok=True)


def _compare(unit: Unit, before: InputState | None, verify: bool) -> str:
    """Compares a unit's inputs with their record: changed, touched (only the time), same, verified or remote."""
    now = unit.input_state
    if now is None:
        return "same"
    if before is None or now.sample != before.sample:
        return "changed"
    if now.modified == before.modified and not verify:
        return "same"
    if any(is_remote(part.path) for part in unit.parts):
        return "remote" if now.modified == before.modified else "changed"
    if before.digest is None:  # the unit is not prepared yet
        return "same"
    if digest_parts(unit.parts) != before.digest:
        return "changed"
    return "verified" if verify else "touched"


@dataclass(frozen=True)
class Preparation:
    """The work of a command, planned once, so that no later part reads settings or inputs again to decide it."""

    config: PipelineConfig  # the settings, with the size of units that the corpus decides
    units: list[Unit]  # the units, with the states of their files
    plan: PreparePlan
    output: Output


def sample_texts(
    units: Sequence[Unit], corpus: Corpus, content: AnyContent, seed: int, sample_mib: float
) -> Iterator[str]:
    """Normalised texts from the start of each unit (of 256 units chosen by hash, if there are more).

    If a unit is too short for its share, later units give more, so that the sample is full if the corpus suffices.
    """
    shuffled = sorted(units, key=lambda unit: hashlib.blake2b(f"{seed}/{unit.name}".encode()).digest())
    # Small ones first, as only later ones can give more.
    chosen = sorted(shuffled[:_SAMPLED_UNITS], key=lambda unit: (unit.num_bytes, unit.name))
    left = sample_mib * MIB  # characters: each counts as a byte, whatever its length in UTF-8
    for index, unit in enumerate(chosen):
        share = left / (len(chosen) - index)
        for record in UnitReader(unit, corpus, content):
            if share <= 0:
                break
            for raw in texts_of(record):
                text = normalise(raw)
                share -= len(text)
                left -= len(text)
                yield text


def write_shared_files(job: Preparation, folder: Path) -> TokenizerInfo | None:
    """Writes the files that every task needs, unless they exist; None if the content has no text."""
    config, tokenizer = job.config, job.config.tokenizer
    if config.filters.contamination and not (folder / INDEX).exists():
        with atomic_file(folder / INDEX) as aside:
            build_index(config.filters.contamination, aside)
    if tokenizer is None:
        return None
    if not (folder / TOKENIZER).exists():
        if isinstance(tokenizer, TrainedTokenizer):
            get_logger().info("training a tokenizer on %g MiB of the corpus", tokenizer.sample_mib)
            texts = sample_texts(job.units, config.corpus, config.content, config.seed, tokenizer.sample_mib)
            hf_tokenizer = train_tokenizer(texts, tokenizer.vocab_size)
        else:
            hf_tokenizer = load_tokenizer(tokenizer.name, tokenizer.trust_remote_code)
        with atomic_folder(folder / TOKENIZER) as aside:
            try:
                hf_tokenizer.save_pretrained(str(aside))
            except Exception as error:
                if type(error) is not Exception:
                    raise
                # `tokenizers` raises plain Exception.
                raise OSError(f"{folder / TOKENIZER} cannot be written: {error}") from error
    return describe_tokenizer(load_tokenizer(str(folder / TOKENIZER)), tokenizer.kind)


def output_engine(job: Preparation, folder: Path, units: Sequence[Unit]) -> EngineName | None:
    """The engine for the tokenizer in a folder, compared on texts of units; None if the content has no text."""
    config = job.config
    if config.tokenizer is None:
        return None
    texts = sample_texts(units, config.corpus, config.content, config.seed, _COMPARED_MIB)
    engine, reason = choose_engine(folder / TOKENIZER, config.tokenizer.engine, texts)
    get_logger().info("tokenizing with %s: %s", engine, reason)
    return engine
