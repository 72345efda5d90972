"""Output of one unit: shards, ledger, rejected documents and, last, the sidecar."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from declutr.common.storage import hash_file, write_text
from declutr.pipeline.config import PipelineConfig, config_hash
from declutr.pipeline.job.units import Unit, hash_unit
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.readers.input_state import InputState
from declutr.pipeline.shards.content import LABELS, NO_LABEL, Layout
from declutr.pipeline.shards.ledger import Counts, Entry, LedgerFile, LedgerWriter, rejected_writer
from declutr.pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Shard, Sidecar
from declutr.pipeline.shards.media import Clip, Image, Media
from declutr.pipeline.shards.writer import ShardWriter, media_schema, shard_schema
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo


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
        by_reason = ("dropped", "failed", "labels", "notes")
        return Counts(**(vars(self) | {name: dict(sorted(getattr(self, name).items())) for name in by_reason}))


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
        self.running = RunningCounts()
        self.conflict: str | None = None
        """An example of a copy whose label differs from that of the kept row."""

    def __enter__(self) -> Self:
        for part in (*self._shards.values(), self._ledger):
            self.enter_context(part)
        self._write_rejected = self.enter_context(self._rejected)
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
        row = shard.add(entry.id, content, entry.source, entry.offset, layout)
        if isinstance(content, Image | Clip):
            self.running.labels.update([content.label] if content.label else [])
            self.running.notes.update(entry.detail.split(", ") if entry.detail else [])
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
            config_hash=self._config_hash,
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


def sidecar_path(folder: Path, unit: str) -> Path:
    """Path of a unit's sidecar."""
    return folder / "units" / f"{unit}.json"


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
    """The sidecar of a finished unit: same input, same settings, all files whole; else None.

    Files that are newer than the sidecar are read; others are whole if they have their size.
    """
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
