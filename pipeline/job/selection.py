"""Last stage of a unit if duplicates are removed: writes its candidates without the duplicates."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline.config import PipelineConfig
from pipeline.duplicates.table import removed
from pipeline.job.unit_writer import UnitWriter, load_sidecar
from pipeline.job.units import Unit
from pipeline.job.worker import CANDIDATES
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
    tokens: dict[str, Iterator[NDArray[np.uint32]]] = {}
    for split in SPLITS:
        tokens[split] = _tokens(candidates / f"{split}-{unit.name}.arrow")
    texts = _rejected_texts(candidates, unit.name) if config.write_rejected else None
    decoder = Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json")) if config.write_rejected else None
    writer = UnitWriter(folder, unit, config, tokenizer)
    with writer:
        for ordinal, entry in enumerate(ledger_entries(candidates / LEDGERS / f"{unit.name}.arrow")):
            if entry.row is None:
                writer.reject(entry, next(texts) if texts else "")
                continue
            ids = next(tokens[entry.fate])
            copy = copies.get(ordinal)
            if copy is None:
                writer.keep(entry, ids)
            else:
                kept = f"{copy.kept_unit}:{copy.kept_ordinal} is kept, similarity {copy.similarity:.2f}"
                text = decoder.decode(ids.tolist()).strip() if decoder else ""
                writer.reject(replace(entry, fate=REASONS[copy.kind], row=None, detail=kept), text)
    noted = load_sidecar(candidates, unit.name)
    return writer.finish(noted.stamp if noted else None)


def _tokens(shard: Path) -> Iterator[NDArray[np.uint32]]:
    """Tokens of a shard's documents in row order; none if the shard does not exist."""
    if not shard.exists():
        return
    with pa.memory_map(str(shard)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            column = reader.get_batch(index).column("tokens")
            values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
            for start, stop in pairwise(offsets.tolist()):
                yield values[start:stop]


def _rejected_texts(candidates: Path, unit: str) -> Iterator[str]:
    """Texts of the already rejected candidates, in reading order."""
    with gzip.open(candidates / REJECTED / f"{unit}.jsonl.gz", "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]
