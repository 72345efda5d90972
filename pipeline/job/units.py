"""Units of work: how the inputs are cut into them, how a task reads one, and what it writes, the sidecar last.

They depend only on the inputs and the configuration, not on the workers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from declutr.common.config import Strict
from declutr.common.errors import missing_extra
from declutr.common.storage import hash_file, hash_json, record_of, write_text
from declutr.common.stores.address import RETRY_SECONDS, retried
from declutr.pipeline.config import PipelineConfig, config_hash
from declutr.pipeline.media.media_rows import blob_rules, document_texts, media_rows
from declutr.pipeline.readers.corpus import (
    JSON_SUFFIX,
    MIB,
    SUFFIXES,
    UNIT_MIB,
    FilesCorpus,
    HubCorpus,
    Part,
    ReadFailure,
    Record,
    Rules,
    bare_suffix,
    rules_of,
)
from declutr.pipeline.readers.files import Meter, read_part
from declutr.pipeline.readers.input_state import FileState, InputState, digest_parts, input_state_of, read_file_states
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.pydocs import PythonDocs, python_parts, read_python
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.readers.streams import StoreLostError
from declutr.pipeline.shards.content import (
    LABELS,
    NO_LABEL,
    AnyContent,
    AudioContent,
    DocumentsContent,
    ImagesContent,
    Layout,
    keys_of,
)
from declutr.pipeline.shards.ledger import (
    REJECTED,
    Counts,
    Entry,
    LedgerFile,
    LedgerWriter,
    LossCounter,
    Losses,
    rejected_writer,
    sum_counts,
)
from declutr.pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Shard, Sidecar
from declutr.pipeline.shards.media import Clip, Image, Media
from declutr.pipeline.shards.writer import ShardWriter, media_schema, shard_schema
from declutr.pipeline.texts import MAX_FILE_BYTES, rows
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

T = TypeVar("T")

Corpus = FilesCorpus | HubCorpus | PythonDocs
DOCUMENTS = DocumentsContent()
MOST_UNITS = 65_536
UNITS = "units"  # folder of the sidecars in the output folder


class Unit(Strict):
    """Parts of the corpus that one task reads in order and writes to the shards named after the unit."""

    name: str  # the unit's place in the plan, five or more digits
    parts: list[Part]
    # State of its files when the plan was made, by path; empty without a call of `with_file_states`.
    file_states: dict[str, FileState | None] = Field(default_factory=dict)
    retry_seconds: float = RETRY_SECONDS  # time for which a store that does not answer is asked again
    # True if the host that made the plan has the extra `documents`.
    documents: bool = Field(default_factory=lambda: not missing_extra("documents", ""))

    @property
    def input_state(self) -> InputState | None:
        """State of its inputs when the plan was made."""
        return input_state_of(self.parts, self.file_states) if self.file_states else None

    @property
    def reads_documents(self) -> bool:
        """True if the extra `documents` is there and may decide about its files: by their names, or in archives."""
        suffixes = {bare_suffix(part.source) for part in self.parts if part.format in ("stream", "tar")}
        return self.documents and not suffixes <= {*SUFFIXES, JSON_SUFFIX}

    @property
    def num_bytes(self) -> int:
        """Input bytes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def weight(self) -> int:
        """Approximate bytes of text."""
        return sum(part.weight for part in self.parts)


class UnitReader(Iterator[Record]):
    """Every row and failure of a unit, in order, and the input bytes read for them so far."""

    def __init__(self, unit: Unit, corpus: Corpus, content: AnyContent = DOCUMENTS) -> None:
        self._done = self._part_bytes = self._max_bytes_read = 0
        self._losses = LossCounter()
        self._meter = Meter()
        rules = None if isinstance(corpus, PythonDocs) else _rules(corpus, content, unit.reads_documents)
        records = self._read(unit, rules)
        if isinstance(content, ImagesContent | AudioContent):
            self._records = media_rows(records, content)
        else:
            records = document_texts(records, rules) if rules and rules.documents else records
            self._records = records if content.kind == "documents" else rows(records, content)

    def __next__(self) -> Record:
        try:
            return next(self._records)
        except StoreLostError as error:  # what it still has is not lost, so this is no failure to count
            raise OSError(str(error)) from error

    @property
    def bytes_read(self) -> int:
        """Input bytes (compressed if the input is) from 0 to the unit's `num_bytes`, slightly ahead of the records."""
        # A chunk can reach beyond its part.
        now = self._done + min(self._part_bytes, max(0, int(self._meter.measure())))
        self._max_bytes_read = max(self._max_bytes_read, now)  # `unread` moves a stream back
        return self._max_bytes_read

    @property
    def losses(self) -> Losses:
        """Counts of the files that were read to their ends."""
        return self._losses.losses()

    def _read(self, unit: Unit, rules: Rules | None) -> Iterator[Record]:
        for part in unit.parts:
            self._meter, self._part_bytes = Meter(), part.num_bytes
            for record in read_part(part, rules, self._meter, unit.retry_seconds) if rules else read_python(part):
                self._losses.add(record, part.source)
                yield record
            self._losses.end(part.source, part.start == 0, part.num_bytes, self.bytes_read - self._done)
            self._meter, self._part_bytes = Meter(), 0
            self._done += part.num_bytes


def _rules(corpus: FilesCorpus | HubCorpus, content: AnyContent, documents: bool) -> Rules:
    """Rules for reading the files of a corpus with this content."""
    if content.kind == "documents":
        return rules_of(corpus, documents=documents)
    max_file_bytes = MAX_FILE_BYTES if content.kind == "pairs" else None
    return rules_of(corpus, keys_of(content), max_file_bytes, blob_rules(content), documents)


def in_groups(items: Iterable[T], weight: Callable[[T], int], most_weight: int) -> list[list[T]]:
    """Neighbours together: groups of at most this weight, or of one item."""
    groups, total = list[list[T]](), 0
    for item in items:
        if not groups or total + weight(item) > most_weight:
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += weight(item)
    return groups


def plan_units(
    corpus: Corpus, unit_mib: float | None, skipped: Skipped | None = None, content: AnyContent = DOCUMENTS
) -> tuple[list[Unit], list[str]]:
    """Groups the corpus into units of about `unit_mib` MiB of uncompressed text, or UNIT_MIB; see `file_parts`."""
    unit_bytes, documents = max(1, int((unit_mib or UNIT_MIB) * MIB)), not missing_extra("documents", "")
    parts, problems = (
        (python_parts(), list[str]())
        if isinstance(corpus, PythonDocs)
        else file_parts(corpus, unit_bytes, skipped, _rules(corpus, content, documents))
    )
    groups = in_groups(parts, lambda part: part.weight, unit_bytes)
    return [Unit(name=f"{index:05d}", parts=group, documents=documents) for index, group in enumerate(groups)], problems


def fit_units(
    corpus: Corpus,
    unit_mib: float | None,
    skipped: Skipped | None = None,
    content: AnyContent = DOCUMENTS,
    least_mib: float = UNIT_MIB,
    most_units: int = MOST_UNITS,
) -> tuple[float, list[Unit], list[str]]:
    """The size of units in MiB, the units, and the problems of the inputs.

    Without a given size, units have `least_mib`, and more if there would be over `most_units` of them. The manifest has
    an entry for each shard of a unit, which every worker of a run reads, so their number must not grow with the corpus.
    """
    chosen = unit_mib or least_mib
    units, problems = plan_units(corpus, chosen, skipped, content)
    if unit_mib is None and len(units) > most_units:
        chosen = math.ceil(sum(unit.weight for unit in units) / MIB / most_units)
        units, problems = plan_units(corpus, chosen, None, content)  # what is skipped is counted already
    return float(chosen), units, problems


def hash_unit(unit: Unit) -> str:
    """SHA-256 of a unit's parts, by name and size but not by path."""
    parts = (part.model_dump(exclude={"path"}) for part in unit.parts)  # a corpus may move between two runs
    return hash_json([*parts, *["documents"] * unit.reads_documents])  # an archive has others without the extra


def with_file_states(units: Sequence[Unit], retry_seconds: float = RETRY_SECONDS) -> list[Unit]:
    """The units with the states of their files, each examined once, and the time for a store that does not answer."""
    states = read_file_states(part for unit in units for part in unit.parts)
    of_units = [{part.path: states[part.path] for part in unit.parts} for unit in units]
    updates = [{"file_states": of_unit, "retry_seconds": retry_seconds} for of_unit in of_units]
    return [unit.model_copy(update=update) for unit, update in zip(units, updates, strict=True)]


def input_state_read(unit: Unit) -> InputState | None:
    """The input state of a unit that was just read; None if `with_file_states` recorded no state of its files."""
    if not unit.file_states:
        return None
    digest = digest_parts(unit.parts)  # before the check, so that a change while it is computed is seen
    check_unchanged(unit)
    return input_state_of(unit.parts, unit.file_states, digest)


def check_unchanged(unit: Unit) -> None:
    """Checks, as `input_state_read`, that the files of a unit are as when it was planned."""
    now = retried(unit.parts[0].path, unit.retry_seconds, lambda: read_file_states(unit.parts))
    for part in unit.parts:
        if now[part.path] is not None and now[part.path] != unit.file_states[part.path]:
            raise OSError(f"{part.source} was changed while the corpus was being read; do not modify inputs meanwhile")


class UnitWriter(ExitStack):
    """A context that takes the documents of a unit in reading order, kept or not; call `finish` after it."""

    def __init__(self, folder: Path, unit: Unit, config: PipelineConfig, tokenizer: TokenizerInfo | None) -> None:
        super().__init__()
        kind = config.content.kind
        if kind == "images" or kind == "audio":
            schema = media_schema(kind)
        else:
            assert tokenizer is not None
            geometry, short_documents = config.geometry, config.short_documents
            schema = shard_schema(tokenizer.vocab_size, geometry, tokenizer.fingerprint, short_documents, kind)
        self._folder, self._unit, self._config_hash = folder, unit, config_hash(config)
        self._shards = {s: ShardWriter(folder, unit.name, s, schema, config.record_batch_rows) for s in SPLITS}
        self._ledger = LedgerWriter(folder, unit.name)
        self._rejected = rejected_writer(folder, unit.name, config.write_rejected)
        self._failures: list[ReadFailure] = []
        self._unk_id = tokenizer.unk_token_id if tokenizer else None
        self.running = Counts()
        self.conflict: str | None = None  # an example of a copy whose label differs from that of the kept row

    def __enter__(self) -> Self:
        for part in (*self._shards.values(), self._ledger):
            self.enter_context(part)
        self._write_rejected = self.enter_context(self._rejected)
        return self

    def keep(
        self,
        entry: Entry,  # its ledger row
        content: NDArray[np.uint32] | Media,  # token ids of a document or of short texts; or an image or a clip
        layout: Layout | None = None,  # places of the short texts
    ) -> None:
        """Adds a row to the shard of the split that its status names."""
        assert entry.id is not None
        shard = self._shards[entry.status]  # type: ignore[index]
        row = shard.add(entry.id, content, entry.source, entry.offset, layout)
        if isinstance(content, Image | Clip):
            self.running.labels.update([content.label] if content.label else [])
            self.running.notes.update(entry.detail.split(", ") if entry.detail else [])
        if layout is not None:
            self.running.labels.update(LABELS[label] for label in layout.labels.tolist() if label != NO_LABEL)
        if self._unk_id is not None and isinstance(content, np.ndarray):
            self.running.unknown_tokens += int(np.count_nonzero(content == self._unk_id))
        self.running.add(entry, True)
        self._ledger.add(replace(entry, row=row))

    def reject(self, entry: Entry, text: str) -> None:
        """Adds a document that is dropped or, if it has no id, could not be read; its status is the reason."""
        if entry.id is None and len(self._failures) < MAX_EXAMPLES:
            example = {"reason": entry.status, "source": entry.source, "offset": entry.offset}
            self._failures.append(ReadFailure.model_validate(example | {"message": entry.detail or ""}))
        self.running.add(entry, False)
        self._ledger.add(entry)
        self._write_rejected(entry, text)

    def finish(self, input_state: InputState | None = None, losses: Losses | None = None) -> Sidecar:
        """Writes the sidecar with the state of the inputs and the losses of files: the unit is finished."""
        counts = sum_counts([self.running])
        counts.check(f"unit {self._unit.name}")
        others = [f"{REJECTED}/{self._unit.name}.jsonl.gz", f"keys/{self._unit.name}.arrow"]
        sidecar = Sidecar(
            unit=self._unit.name,
            unit_hash=hash_unit(self._unit),
            config_hash=self._config_hash,
            num_bytes=self._unit.num_bytes,
            counts=counts,
            losses=losses or Losses(),
            failures=self._failures,
            shards=[shard for split in SPLITS for shard in self._shards[split].result()],
            ledger=self._ledger.result(),
            input_state=input_state,
            conflict=self.conflict,
            others={name: astuple(record_of(self._folder / name)) for name in others if (self._folder / name).exists()},
        )
        write_sidecar(self._folder, sidecar)  # after all files: it makes the unit count
        return sidecar


def sidecar_path(folder: Path, unit: str) -> Path:
    """Path of a unit's sidecar."""
    return folder / UNITS / f"{unit}.json"


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Writes a sidecar to an output folder, or to that of candidates."""
    write_text(sidecar_path(folder, sidecar.unit), sidecar.model_dump_json(indent=1) + "\n")


def load_sidecar(folder: Path, unit: str) -> Sidecar | None:
    """The sidecar of a unit, even of other inputs or settings; None if it is missing or damaged."""
    try:
        return Sidecar.model_validate_json(sidecar_path(folder, unit).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def matching_sidecar(unit: Unit, folder: Path, settings_hash: str) -> Sidecar | None:
    """The sidecar of a unit with the same input and settings, whether its files are present or not; else None."""
    sidecar = load_sidecar(folder, unit.name)
    same = sidecar and sidecar.unit_hash == hash_unit(unit) and sidecar.config_hash == settings_hash
    return sidecar if same else None


def finished_sidecar(unit: Unit, folder: Path, settings_hash: str) -> Sidecar | None:
    """A finished unit's sidecar: same input and settings, files whole by size, newer ones by reading; else None."""
    sidecar = matching_sidecar(unit, folder, settings_hash)
    if sidecar is None:
        return None
    written_ns = sidecar_path(folder, unit.name).stat().st_mtime_ns
    files: list[Shard | LedgerFile] = [*sidecar.shards, sidecar.ledger]
    for file in files:
        path = folder / file.name
        if not path.is_file() or (now := path.stat()).st_size != file.num_bytes:
            return None
        if now.st_mtime_ns > written_ns and hash_file(path) != file.sha256:
            return None
    return sidecar
