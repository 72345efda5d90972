"""Held-out documents with their texts, divided into those that choose and those that report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.adaptation.config import LONG_TOKENS
from declutr.common import seeding
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.readers.corpus import Document, Rejected, document_id
from declutr.pipeline.shards.shards import ShardSet, document_keys

Split = Literal["development", "test"]
MOST_DOCUMENTS = 500
"""Documents of a split that are scored: long ones by key, then others; more would hardly narrow the intervals."""
_MOST_OF_FEW = 5 * MOST_DOCUMENTS
"""The same for a corpus that is scored in five folds."""


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
    ids, keys, tokens = _rows(data, "held-out")
    drawn = seeding.unit(seeding.words(seed, "adaptation split", keys, np.zeros_like(keys), 1))[:, 0]
    places: dict[Split, NDArray[np.int64]] = {
        "development": np.flatnonzero(drawn < 0.5),
        "test": np.flatnonzero(drawn >= 0.5),
    }
    chosen = {split: rows[_select(keys[rows], tokens[rows], MOST_DOCUMENTS)].tolist() for split, rows in places.items()}
    texts = _read(config, {ids[place]: int(keys[place]) for rows in chosen.values() for place in rows})
    return {split: [texts[ids[place]] for place in rows if ids[place] in texts] for split, rows in chosen.items()}


def all_documents(config: PipelineConfig, data: Path) -> list[HeldOutDocument]:
    """All documents of a corpus with few long ones, by their keys; of more than 2,500 the long ones and some others."""
    parts = [_rows(data, split) for split in ("train", "held-out")]
    ids = [identity for part in parts for identity in part[0]]
    keys, tokens = (np.concatenate([part[place] for part in parts]) for place in (1, 2))
    keys_by_id = {ids[place]: int(keys[place]) for place in _select(keys, tokens, _MOST_OF_FEW).tolist()}
    return sorted(_read(config, keys_by_id).values(), key=lambda document: document.key)


def _select(keys: NDArray[np.uint64], tokens: NDArray[np.int64], max_documents: int) -> NDArray[np.int64]:
    """Places of at most `max_documents` documents in the order of their keys; long ones have precedence."""
    first = np.lexsort((keys, tokens < LONG_TOKENS))[:max_documents]
    ordered: NDArray[np.int64] = first[np.argsort(keys[first])]
    return ordered


def _rows(data: Path, split: str) -> tuple[list[bytes], NDArray[np.uint64], NDArray[np.int64]]:
    """Ids, keys and numbers of tokens of all documents of a part of the shards."""
    shards = ShardSet(data, split)
    if not shards.num_documents:
        return [], np.empty(0, np.uint64), np.empty(0, np.int64)
    rows = shards.take(np.arange(shards.num_documents))
    return [value.as_py() for value in rows.column("id")], document_keys(rows), rows.column("num_tokens").to_numpy()


def _read(config: PipelineConfig, keys_by_id: dict[bytes, int]) -> dict[bytes, HeldOutDocument]:
    """The documents with these ids, which have these keys."""
    documents: dict[bytes, HeldOutDocument] = {}
    units, _ = plan_units(config.corpus, config.unit_mib)
    for unit in units:
        for record in read_unit(unit, config.corpus):
            if len(documents) == len(keys_by_id):
                return documents
            if isinstance(record, Document) and not isinstance(record, Rejected):
                identity = document_id(normalise(record.text).encode())
                if identity in keys_by_id:
                    documents.setdefault(identity, HeldOutDocument(int(keys_by_id[identity]), record.text))
    return documents
