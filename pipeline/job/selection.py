"""Last stage of a unit if duplicates are removed: writes its candidates without the duplicates."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.table import OTHER_LABEL, kept_labels, removed
from declutr.pipeline.job.unit_writer import UnitWriter, load_sidecar
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.shards.content import AnyContent, Layout
from declutr.pipeline.shards.ledger import LEDGERS, REJECTED, ledger_entries
from declutr.pipeline.shards.manifest import SPLITS, TOKENIZER, Sidecar
from declutr.pipeline.shards.media import Clip, Image, Media, lists, media_rows
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

REASONS = {"exact": "duplicate", "near": "near_duplicate"}
RARE_LABEL = "rare_label"
"""Reason of a row whose label is not among the `content.max_labels` most frequent."""


def most_frequent_labels(candidates: Sequence[Sidecar], content: AnyContent) -> list[str] | None:
    """The labels whose rows are kept, the most frequent first; None: all."""
    limit = getattr(content, "max_labels", None)
    if limit is None:
        return None
    counted: Counter[str] = Counter()
    for sidecar in candidates:
        counted.update(sidecar.counts.labels)
    return sorted(counted, key=lambda label: (-counted[label], label))[:limit]


def write_selected(unit: Unit, folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo | None) -> Sidecar:
    """Writes one unit from the candidates and the list of duplicates in `folder`, without reading or tokenizing again.

    Raises:
        ShardError: the counts do not balance.
    """
    candidates = folder / CANDIDATES
    copies, labels = removed(folder, unit.name), kept_labels(folder)
    kept_rows: dict[str, Iterator[tuple[NDArray[np.uint32] | Media, Layout | None]]] = {
        split: _rows(candidates / f"{split}-{unit.name}.arrow") for split in SPLITS
    }
    texts = _rejected_texts(candidates, unit.name) if config.write_rejected else None
    decoder = None
    if config.write_rejected and tokenizer is not None:
        decoder = Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json"))
    writer = UnitWriter(folder, unit, config, tokenizer)
    with writer:
        for ordinal, entry in enumerate(ledger_entries(candidates / LEDGERS / f"{unit.name}.arrow")):
            if entry.row is None:
                writer.reject(entry, next(texts) if texts else "")
                continue
            content, layout = next(kept_rows[entry.status])
            copy = copies.get(ordinal)
            if (
                copy is None
                and labels is not None
                and isinstance(content, Image | Clip)
                and content.label not in labels
            ):
                detail = f"label {content.label!r} is not one of the {len(labels)} most frequent"
                writer.reject(replace(entry, status=RARE_LABEL, row=None, detail=detail), "")
            elif copy is None:
                writer.keep(entry, content, layout)
            else:
                kept = f"{copy.kept_unit}:{copy.kept_ordinal} is kept, similarity {copy.similarity:.2f}"
                text = (
                    "" if decoder is None or isinstance(content, Image | Clip) else _decoded(decoder, content, layout)
                )
                status = REASONS[copy.kind]
                if copy.kept_label is not None and isinstance(content, Image | Clip):
                    status = OTHER_LABEL
                    kept += f", label {copy.kept_label!r} there, {content.label!r} here"
                    writer.conflict = writer.conflict or f"{entry.source!r}: {kept}"
                writer.reject(replace(entry, status=status, row=None, detail=kept), text)
    noted = load_sidecar(candidates, unit.name)
    return writer.finish(noted.input_state if noted else None)


def _decoded(decoder: Tokenizer, ids: NDArray[np.uint32], layout: Layout | None) -> str:
    """The text of a row; several texts are joined by newlines."""
    texts = [ids] if layout is None else np.split(ids, layout.starts[1:])
    return "\n".join(decoder.decode(text.tolist()).strip() for text in texts)


def _rows(shard: Path) -> Iterator[tuple[NDArray[np.uint32] | Media, Layout | None]]:
    """Tokens and layout of a shard's rows, or images or clips, in order; none if the shard does not exist."""
    if not shard.exists():
        return
    with pa.memory_map(str(shard)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            if "tokens" not in batch.schema.names:
                yield from ((media, None) for media in media_rows(batch))
                continue
            names = [name for name in ("tokens", "starts", "labels") if name in batch.schema.names]
            columns = [lists(batch.column(name)) for name in names]
            for tokens, *layout in zip(*columns, strict=True):
                yield tokens, Layout(*layout) if layout else None


def _rejected_texts(candidates: Path, unit: str) -> Iterator[str]:
    """Texts of the already rejected candidates, in reading order."""
    with gzip.open(candidates / REJECTED / f"{unit}.jsonl.gz", "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]
