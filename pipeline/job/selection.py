"""Last stage of a unit if duplicates are removed: writes its candidates without the duplicates."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.config import PipelineConfig
from pipeline.duplicates.table import removed
from pipeline.job.unit_writer import UnitWriter, load_sidecar
from pipeline.job.units import Unit
from pipeline.job.worker import CANDIDATES
from pipeline.shards.content import Layout
from pipeline.shards.ledger import LEDGERS, REJECTED, ledger_entries
from pipeline.shards.manifest import SPLITS, TOKENIZER, Sidecar
from pipeline.tokenizer.tokenization import TokenizerInfo

REASONS = {"exact": "duplicate", "near": "near_duplicate"}


def write_selected(unit: Unit, folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo) -> Sidecar:
    """Writes one unit from the candidates and the list of duplicates in `folder`, without reading or tokenizing again.

    Raises:
        ShardError: the counts do not balance.
    """
    candidates = folder / CANDIDATES
    copies = removed(folder, unit.name)
    kept_rows: dict[str, Iterator[tuple[NDArray[np.uint32], Layout | None]]] = {
        split: _rows(candidates / f"{split}-{unit.name}.arrow") for split in SPLITS
    }
    texts = _rejected_texts(candidates, unit.name) if config.write_rejected else None
    decoder = Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json")) if config.write_rejected else None
    writer = UnitWriter(folder, unit, config, tokenizer)
    with writer:
        for ordinal, entry in enumerate(ledger_entries(candidates / LEDGERS / f"{unit.name}.arrow")):
            if entry.row is None:
                writer.reject(entry, next(texts) if texts else "")
                continue
            ids, layout = next(kept_rows[entry.fate])
            copy = copies.get(ordinal)
            if copy is None:
                writer.keep(entry, ids, layout)
            else:
                kept = f"{copy.kept_unit}:{copy.kept_ordinal} is kept, similarity {copy.similarity:.2f}"
                text = _decoded(decoder, ids, layout) if decoder else ""
                writer.reject(replace(entry, fate=REASONS[copy.kind], row=None, detail=kept), text)
    noted = load_sidecar(candidates, unit.name)
    return writer.finish(noted.stamp if noted else None)


def _decoded(decoder: Tokenizer, ids: NDArray[np.uint32], layout: Layout | None) -> str:
    """The text of a row; several texts are joined by newlines."""
    texts = [ids] if layout is None else np.split(ids, layout.starts[1:])
    return "\n".join(decoder.decode(text.tolist()).strip() for text in texts)


def _rows(shard: Path) -> Iterator[tuple[NDArray[np.uint32], Layout | None]]:
    """Tokens and layout of a shard's rows, in order; none if the shard does not exist."""
    if not shard.exists():
        return
    with pa.memory_map(str(shard)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            names = [name for name in ("tokens", "starts", "labels") if name in batch.schema.names]
            columns = [_lists(batch.column(name)) for name in names]
            for tokens, *layout in zip(*columns, strict=True):
                yield tokens, Layout(*layout) if layout else None


def _lists(column: pa.Array) -> Iterator[NDArray[Any]]:
    """The lists of a column."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    for start, stop in pairwise(offsets.tolist()):
        yield values[start:stop]


def _rejected_texts(candidates: Path, unit: str) -> Iterator[str]:
    """Texts of the already rejected candidates, in reading order."""
    with gzip.open(candidates / REJECTED / f"{unit}.jsonl.gz", "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]
