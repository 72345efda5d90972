"""Output files of a unit: shards, ledger, rejected documents and, last, the sidecar that marks it as finished."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from common.storage import write_text
from pipeline.config import PipelineConfig, config_hash
from pipeline.job.progress import Done
from pipeline.job.units import Unit, hash_unit
from pipeline.readers.corpus import ReadFailure
from pipeline.readers.stamp import Stamp
from pipeline.shards.content import LABELS, NO_LABEL, Layout
from pipeline.shards.ledger import Entry, LedgerWriter
from pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Counts, Sidecar
from pipeline.shards.rejected import RejectedWriter
from pipeline.shards.schema import shard_schema
from pipeline.shards.writer import ShardWriter
from pipeline.tokenizer.tokenization import TokenizerInfo


class UnitWriter:
    """A context that takes the documents of a unit in reading order, kept or not; call `finish` after it.

    Args:
        folder: target folder.
        unit: the unit.
        config: settings.
        tokenizer: facts of the tokenizer.
    """

    def __init__(self, folder: Path, unit: Unit, config: PipelineConfig, tokenizer: TokenizerInfo) -> None:
        facts = tokenizer.vocab_size, config.geometry, tokenizer.fingerprint
        schema = shard_schema(*facts, config.short_documents, config.content.kind)
        self._folder, self._unit, self._config = folder, unit, config
        self._shards = {s: ShardWriter(folder, unit.name, s, schema, config.block_documents) for s in SPLITS}
        self._ledger = LedgerWriter(folder, unit.name)
        self._rejected = RejectedWriter(folder, unit.name, config.write_rejected)
        self._stack = ExitStack()
        self._kept = self._text_bytes = self._longest_tokens = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._failures: list[ReadFailure] = []
        self._labels: Counter[str] = Counter()

    def __enter__(self) -> "UnitWriter":
        for shard in self._shards.values():
            self._stack.enter_context(shard)
        self._stack.enter_context(self._ledger)
        self._stack.enter_context(self._rejected)
        return self

    def keep(self, entry: Entry, tokens: NDArray[np.uint32], layout: Layout | None = None) -> None:
        """Adds a document, or a row of short texts with their layout, to the shard of the split that its fate names.

        Raises:
            ShardError: a token id is beyond the vocabulary.
        """
        assert entry.id is not None
        shard = self._shards[entry.fate]  # type: ignore[index]
        row = shard.add(entry.id, tokens, entry.source, entry.offset, layout)
        if layout is not None:
            self._labels.update(LABELS[label] for label in layout.labels.tolist() if label != NO_LABEL)
        self._kept += 1
        self._record(replace(entry, row=row))

    def reject(self, entry: Entry, text: str) -> None:
        """Adds a document that is dropped or, if it has no id, could not be read; its fate is the reason."""
        if entry.id is None:
            self._failed[entry.fate] += 1
            if len(self._failures) < MAX_EXAMPLES:
                example = {"reason": entry.fate, "source": entry.source, "offset": entry.offset}
                self._failures.append(ReadFailure.model_validate(example | {"message": entry.detail or ""}))
        else:
            self._dropped[entry.fate] += 1
        self._record(entry)
        self._rejected.add(entry, text)

    def _record(self, entry: Entry) -> None:
        self._text_bytes += entry.text_bytes
        self._longest_tokens = max(self._longest_tokens, entry.num_tokens or 0)
        self._ledger.add(entry)

    def done(self, bytes_read: int) -> Done:
        """Work on the unit after `bytes_read` bytes of its input."""
        return Done(
            num_bytes=bytes_read,
            documents=self._ledger.num_rows,
            kept=self._kept,
            failed=sum(self._failed.values()),
            text_bytes=self._text_bytes,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def finish(self, stamp: Stamp | None = None) -> Sidecar:
        """Writes the sidecar with the state of the inputs: the unit is finished.

        Raises:
            ShardError: the counts do not balance.
        """
        counts = Counts(
            read=self._ledger.num_rows,
            kept=self._kept,
            dropped=dict(sorted(self._dropped.items())),
            failed=dict(sorted(self._failed.items())),
            text_bytes=self._text_bytes,
            longest_tokens=self._longest_tokens,
            labels=dict(sorted(self._labels.items())),
        )
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
            stamp=stamp,
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


def finished_sidecar(unit: Unit, folder: Path, config: PipelineConfig) -> Sidecar | None:
    """The sidecar of a finished unit: same input, same settings, all files present in full size; else None."""
    sidecar = load_sidecar(folder, unit.name)
    if sidecar is None:
        return None
    same = sidecar.unit_hash == hash_unit(unit) and sidecar.config_hash == config_hash(config)
    sizes = {shard.name: shard.num_bytes for shard in sidecar.shards} | {sidecar.ledger.name: sidecar.ledger.num_bytes}
    whole = all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())
    return sidecar if same and whole else None
