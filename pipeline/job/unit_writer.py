"""Status of each record of a unit, and its output: shards, ledger, rejected documents and, last, the sidecar."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from declutr.common import seeding
from declutr.common.storage import hash_file, write_text
from declutr.pipeline.config import PipelineConfig, config_hash
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.units import Unit, hash_unit
from declutr.pipeline.media.media_rows import MediaRow, RejectedMedia
from declutr.pipeline.readers.corpus import ReadFailure, Record, Rejected, document_id
from declutr.pipeline.readers.input_state import InputState
from declutr.pipeline.shards.content import LABELS, NO_LABEL, Layout
from declutr.pipeline.shards.ledger import Entry, LedgerFile, LedgerWriter, rejected_writer
from declutr.pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Counts, Shard, Sidecar, Split
from declutr.pipeline.shards.media import Clip, Image, Media, joined_notes, notes_of
from declutr.pipeline.shards.schema import media_schema, shard_schema
from declutr.pipeline.shards.writer import ShardWriter
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo


@dataclass(frozen=True, slots=True)
class Decision:
    """A document before it is written: its ledger row, with an empty status unless a rule has dropped it."""

    entry: Entry
    text: str
    texts: tuple[str, ...] = ()
    """Texts of a row of sentences, pairs or triples, cleaned; none for documents."""
    labels: tuple[int, ...] = ()
    """Label of each text."""
    layout: Layout | None = None
    """Places of the texts in the row's tokens, if it is kept."""

    @property
    def split_key(self) -> bytes:
        """16 bytes by which its split is drawn: its id, or for several texts a hash of the premise."""
        if len(self.texts) > 1:
            return document_id(normalise(self.texts[0]).encode())
        return self.entry.id or b""


def splits_of(identities: Sequence[bytes], config: PipelineConfig) -> list[Split]:
    """Splits of documents, drawn by their ids so that equal texts are never in both splits."""
    keys = np.array([int.from_bytes(identity[:8], "little") for identity in identities], dtype=np.uint64)
    drawn = seeding.unit(seeding.words(config.seed, "held-out", keys, np.zeros_like(keys), 1))[:, 0]
    return ["held-out" if held_out else "train" for held_out in (drawn < config.validation_fraction).tolist()]


def decide_unread(record: Record) -> Decision | None:
    """Decides on a record that forms no row; None if it is one."""
    if isinstance(record, ReadFailure):
        return Decision(
            Entry(None, record.source, record.offset, 0, None, None, record.reason, None, record.message), ""
        )
    if isinstance(record, Rejected):
        raw = record.text.encode()
        entry = Entry(document_id(raw), record.source, record.offset, len(raw), None, None, record.reason, None, None)
        return Decision(entry, record.text)
    return None


def decide_media(records: Iterator[Record], config: PipelineConfig) -> Iterator[tuple[Decision, Media | None]]:
    """Every image or clip with its status, in order."""
    for record in records:
        media, place = None, (record.source, record.offset)
        if isinstance(record, MediaRow):
            media = record.media
            [split] = splits_of([record.id], config)
            notes = joined_notes(record.notes)
            decision = Decision(Entry(record.id, *place, record.num_bytes, media.size, None, split, None, notes), "")
        elif isinstance(record, RejectedMedia):
            entry = Entry(record.id, *place, record.num_bytes, None, None, record.reason, None, record.detail)
            decision = Decision(entry, "")
        else:
            unread = decide_unread(record)
            assert unread is not None
            decision = unread
        yield decision, media


@dataclass
class RunningCounts:
    """Counts of the documents read so far."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    text_bytes: int = 0
    longest_tokens: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, entry: Entry, kept: bool) -> None:
        """Counts one more document; one without an id could not be read."""
        self.read += 1
        self.kept += kept
        if not kept:
            (self.failed if entry.id is None else self.dropped)[entry.status] += 1
        self.text_bytes += entry.text_bytes
        self.longest_tokens = max(self.longest_tokens, entry.num_tokens or 0)

    def counts(self) -> Counts:
        """The counts, sorted by reason."""
        sorted_counts = {
            name: dict(sorted(getattr(self, name).items())) for name in ("dropped", "failed", "labels", "notes")
        }
        return Counts(**(vars(self) | sorted_counts))


class UnitWriter(ExitStack):
    """A context that takes the documents of a unit in reading order, kept or not; call `finish` after it."""

    def __init__(self, folder: Path, unit: Unit, config: PipelineConfig, tokenizer: TokenizerInfo | None) -> None:
        super().__init__()
        schema = _schema(config, tokenizer)
        self._folder, self._unit, self._config = folder, unit, config
        self._shards = {s: ShardWriter(folder, unit.name, s, schema, config.record_batch_rows) for s in SPLITS}
        self._ledger = LedgerWriter(folder, unit.name)
        self._failures: list[ReadFailure] = []
        self.running = RunningCounts()
        self.conflict: str | None = None
        """An example of a copy whose label differs from that of the kept row."""

    def __enter__(self) -> Self:
        for part in (*self._shards.values(), self._ledger):
            self.enter_context(part)
        rejected = rejected_writer(self._folder, self._unit.name, self._config.write_rejected)
        self._write_rejected = self.enter_context(rejected)
        return self

    def keep(self, entry: Entry, content: NDArray[np.uint32] | Media, layout: Layout | None = None) -> None:
        """Adds a row to the shard of the split that its status names.

        Args:
            entry: its ledger row.
            content: token ids of a document or of short texts; or an image or a clip.
            layout: places of the short texts.

        Raises:
            ShardError: a token id is beyond the vocabulary.
        """
        assert entry.id is not None
        shard = self._shards[entry.status]  # type: ignore[index]
        if isinstance(content, Image | Clip):
            row = shard.add_media(entry.id, content, entry.source, entry.offset)
            self.running.labels.update([content.label] if content.label else [])
            self.running.notes.update(notes_of(entry.detail))
        else:
            row = shard.add(entry.id, content, entry.source, entry.offset, layout)
        if layout is not None:
            self.running.labels.update(LABELS[label] for label in layout.labels.tolist() if label != NO_LABEL)
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

    def finish(self, input_state: InputState | None = None) -> Sidecar:
        """Writes the sidecar with the state of the inputs: the unit is finished.

        Raises:
            ShardError: the counts do not balance.
        """
        counts = self.running.counts()
        counts.check(f"unit {self._unit.name}")
        sidecar = Sidecar(
            unit=self._unit.name,
            unit_hash=hash_unit(self._unit),
            config_hash=config_hash(self._config),
            num_bytes=self._unit.num_bytes,
            counts=counts,
            failures=self._failures,
            shards=[shard for split in SPLITS for shard in self._shards[split].result()],
            ledger=self._ledger.result(),
            input_state=input_state,
            conflict=self.conflict,
        )
        write_text(sidecar_path(self._folder, self._unit.name), sidecar.model_dump_json(indent=1) + "\n")
        return sidecar


def _schema(config: PipelineConfig, tokenizer: TokenizerInfo | None) -> pa.Schema:
    """Schema of the shards."""
    kind = config.content.kind
    if kind == "images" or kind == "audio":
        return media_schema(kind)
    assert tokenizer is not None
    return shard_schema(tokenizer.vocab_size, config.geometry, tokenizer.fingerprint, config.short_documents, kind)


def sidecar_path(folder: Path, unit: str) -> Path:
    """Path of a unit's sidecar."""
    return folder / "units" / f"{unit}.json"


def load_sidecar(folder: Path, unit: str) -> Sidecar | None:
    """The sidecar of a unit, even of other inputs or settings; None if it is missing or damaged."""
    try:
        return Sidecar.model_validate_json(sidecar_path(folder, unit).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def finished_sidecar(unit: Unit, folder: Path, config: PipelineConfig) -> Sidecar | None:
    """The sidecar of a finished unit: same input, same settings, all files whole; else None.

    Files that are newer than the sidecar are read; others are whole if they have their size.
    """
    sidecar = matching_sidecar(unit, folder, config)
    if sidecar is None:
        return None
    written = sidecar_path(folder, unit.name).stat().st_mtime_ns
    files: list[Shard | LedgerFile] = [*sidecar.shards, sidecar.ledger]
    return sidecar if all(_is_whole(folder / file.name, file, written) for file in files) else None


def _is_whole(path: Path, file: Shard | LedgerFile, written_ns: int) -> bool:
    if not path.is_file() or (now := path.stat()).st_size != file.num_bytes:
        return False
    return now.st_mtime_ns <= written_ns or hash_file(path) == file.sha256


def matching_sidecar(unit: Unit, folder: Path, config: PipelineConfig) -> Sidecar | None:
    """The sidecar of a unit with the same input and settings, whether its files are present or not; else None."""
    sidecar = load_sidecar(folder, unit.name)
    if sidecar is None:
        return None
    same = sidecar.unit_hash == hash_unit(unit) and sidecar.config_hash == config_hash(config)
    return sidecar if same else None
