"""What one task does: read a unit, tokenize, keep or drop, write the unit's shards and, last, its sidecar."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from common import seeding
from common.storage import write_text
from pipeline.config import PipelineConfig, config_hash
from pipeline.corpus import Document, Failure, document_id, normalise
from pipeline.encoder import Encoder, EngineName
from pipeline.filters import drop_reason
from pipeline.manifest import MAX_EXAMPLES, SPLITS, Counts, Sidecar, Split
from pipeline.readers import Record
from pipeline.schema import shard_schema
from pipeline.tokenization import TokenizerInfo
from pipeline.units import Unit, hash_unit, read_unit
from pipeline.writer import ShardWriter

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000

Batch = list[tuple[str, bytes, Document]]


def prepare_unit(
    row: dict[str, str], folder: str, config: PipelineConfig, tokenizer: TokenizerInfo, engine: EngineName
) -> dict[str, str]:
    """The function Ray Data maps over units: `{"unit": JSON}` in, `{"sidecar": JSON}` out."""
    # Ray gives a task one CPU; the tokenizer's own threads would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit = Unit.model_validate_json(row["unit"])
    return {"sidecar": write_unit(unit, Path(folder), config, tokenizer, engine).model_dump_json()}


def sidecar_path(folder: Path, unit: str) -> Path:
    """Where a unit's sidecar lies in the output folder."""
    return folder / "units" / f"{unit}.json"


def finished_sidecar(unit: Unit, folder: Path, config: PipelineConfig) -> Sidecar | None:
    """The sidecar of a unit that needs no more work: same input, same settings, its shards there in full size."""
    path = sidecar_path(folder, unit.name)
    try:
        sidecar = Sidecar.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    same = sidecar.unit_hash == hash_unit(unit) and sidecar.config_hash == config_hash(config)
    files = [(folder / shard.name, shard.num_bytes) for shard in sidecar.shards]
    whole = all(file.is_file() and file.stat().st_size == size for file, size in files)
    return sidecar if same and whole else None


def write_unit(
    unit: Unit, folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo, engine: EngineName = "tokenizers"
) -> Sidecar:
    """Prepares one unit. Its bytes depend on the unit, the settings and the tokenizer, and on nothing else.

    Raises:
        ShardError: the tokenizer gave an id beyond its vocabulary, or the counts do not close.
    """
    encoder = _encoder(str(folder / "tokenizer"), tokenizer.fingerprint, engine)
    schema = shard_schema(tokenizer.vocab_size, config.geometry, tokenizer.fingerprint)
    failures: list[Failure] = []
    failed: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    read = kept = text_bytes = longest_tokens = 0
    with ExitStack() as stack:
        writers = _open_writers(stack, folder, unit.name, schema, config.block_documents)
        for batch, batch_failures in _batches(read_unit(unit, config.corpus)):
            failures += batch_failures[: MAX_EXAMPLES - len(failures)]
            failed.update(failure.reason for failure in batch_failures)
            read += len(batch) + len(batch_failures)
            rows = encoder.encode([text for text, _, _ in batch])
            for (text, identity, document), tokens in zip(batch, rows, strict=True):
                text_bytes += len(text.encode())
                longest_tokens = max(longest_tokens, len(tokens))
                reason = drop_reason(len(tokens), config.geometry)
                if reason:
                    dropped[reason] += 1
                else:
                    kept += 1
                    writers[split_of(identity, config)].add(identity, tokens, document)
    counts = Counts(
        read=read,
        kept=kept,
        dropped=dict(sorted(dropped.items())),
        failed=dict(sorted(failed.items())),
        text_bytes=text_bytes,
        longest_tokens=longest_tokens,
    )
    counts.check(f"unit {unit.name}")
    sidecar = Sidecar(
        unit=unit.name,
        unit_hash=hash_unit(unit),
        config_hash=config_hash(config),
        num_bytes=unit.num_bytes,
        counts=counts,
        failures=failures,
        shards=[shard for split in SPLITS for shard in writers[split].result()],
    )
    write_text(sidecar_path(folder, unit.name), sidecar.model_dump_json(indent=1) + "\n")
    return sidecar


def split_of(identity: bytes, config: PipelineConfig) -> Split:
    """Which split a document belongs to: a draw keyed by its id, so that equal texts never straddle the splits."""
    key = np.array([int.from_bytes(identity[:8], "little")], dtype=np.uint64)
    drawn = seeding.unit(seeding.words(config.seed, "held-out", key, np.zeros_like(key), 1))[0, 0]
    return "held-out" if drawn < config.held_out_share else "train"


def _open_writers(
    stack: ExitStack, folder: Path, unit: str, schema: pa.Schema, block_documents: int
) -> dict[Split, ShardWriter]:
    """A writer for each split."""
    return {split: stack.enter_context(ShardWriter(folder, unit, split, schema, block_documents)) for split in SPLITS}


def _batches(records: Iterator[Record]) -> Iterator[tuple[Batch, list[Failure]]]:
    """Normalised documents with their ids, a bounded number of characters at a time, and the failures between them."""
    batch: Batch = []
    failures: list[Failure] = []
    held = 0
    for record in records:
        if isinstance(record, Failure):
            failures.append(record)
        else:
            text = normalise(record.text)
            batch.append((text, document_id(text.encode()), Document("", record.source, record.offset)))
            held += len(text)
        if held >= _BATCH_CHARACTERS or len(batch) + len(failures) >= _BATCH_DOCUMENTS:
            yield batch, failures
            batch, failures, held = [], [], 0
    if batch or failures:
        yield batch, failures


@lru_cache(maxsize=2)
def _encoder(folder: str, fingerprint: str, engine: EngineName) -> Encoder:  # noqa: ARG001
    """One encoder a process; the fingerprint keeps apart tokenizers that lay in the same folder one after the other."""
    return Encoder.load(Path(folder), engine)
