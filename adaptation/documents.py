"""Held-out documents with their texts, divided into those that choose and those that report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import Document, Rejected, document_id
from declutr.pipeline.shards.shards import ShardSet, document_keys

Split = Literal["development", "test"]
MOST_DOCUMENTS = 500
"""Documents of a split that are scored, chosen by key; more would hardly narrow the intervals."""


@dataclass(frozen=True)
class HeldOutDocument:
    """A document that is not trained on.

    Attributes:
        key: the key of its random draws.
        text: as read, with its line breaks.
    """

    key: int
    text: str


def held_out_documents(config: PipelineConfig, data: Path, seed: int) -> dict[Split, list[HeldOutDocument]]:
    """The documents of each split, in the order of their keys; reads the corpus again for their texts.

    Which document belongs to which split is a function of the seed and the document.

    Args:
        config: of the preparation.
        data: the prepared corpus.
        seed: of the split.
    """
    ids, keys = _ids_and_keys(data, "held-out")
    drawn = seeding.unit(seeding.words(seed, "adaptation split", keys, np.zeros_like(keys), 1))[:, 0]
    places: dict[Split, NDArray[np.int64]] = {
        "development": np.flatnonzero(drawn < 0.5),
        "test": np.flatnonzero(drawn >= 0.5),
    }
    chosen = {split: mine[np.argsort(keys[mine])][:MOST_DOCUMENTS].tolist() for split, mine in places.items()}
    texts = _read(config, {ids[place]: int(keys[place]) for mine in chosen.values() for place in mine})
    return {split: [texts[ids[place]] for place in mine if ids[place] in texts] for split, mine in chosen.items()}


def all_documents(config: PipelineConfig, data: Path) -> list[HeldOutDocument]:
    """All documents of a small corpus, in the order of their keys."""
    wanted: dict[bytes, int] = {}
    for split in ("train", "held-out"):
        wanted |= dict(zip(*_ids_and_keys(data, split), strict=True))
    return sorted(_read(config, wanted).values(), key=lambda one: one.key)


def _ids_and_keys(data: Path, split: str) -> tuple[list[bytes], NDArray[np.uint64]]:
    shards = ShardSet(data, split)
    if not shards.num_documents:
        return [], np.empty(0, np.uint64)
    rows = shards.take(np.arange(shards.num_documents))
    return [each.as_py() for each in rows.column("id")], document_keys(rows)


def _read(config: PipelineConfig, wanted: dict[bytes, int]) -> dict[bytes, HeldOutDocument]:
    """The documents with these ids, which have these keys."""
    found: dict[bytes, HeldOutDocument] = {}
    units, _ = plan_units(config.corpus, config.unit_mib)
    for unit in units:
        for record in read_unit(unit, config.corpus):
            if len(found) == len(wanted):
                return found
            if isinstance(record, Document) and not isinstance(record, Rejected):
                identity = document_id(normalise(record.text).encode())
                if identity in wanted:
                    found.setdefault(identity, HeldOutDocument(int(wanted[identity]), record.text))
    return found
