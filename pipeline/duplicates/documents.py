"""All documents of a search, numbered in the order of the corpus, and access to their keys and signatures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import ShardError
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.keys import UnitKeys, keys_path, made_with, open_keys

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_OPEN_UNITS = 1024  # files mapped at a time: systems allow about 65,000 maps a process


@dataclass(frozen=True)
class Numbering:
    """Numbers of documents: those of unit i are [starts[i], starts[i + 1])."""

    folder: Path
    units: tuple[str, ...]
    starts: I64
    """`(num_units + 1,)`."""

    def units_of(self, documents: I64) -> I64:
        """Places in the plan of the units that hold the documents, `(n,)`."""
        return np.searchsorted(self.starts, documents, side="right").astype(np.int64) - 1


def number(folder: Path, units: Sequence[str], config: DuplicatesConfig) -> tuple[Numbering, list[str], int]:
    """Numbers the documents of units, given in plan order.

    Returns:
        The numbering, the digest of every unit's keys, and the number of keys.

    Raises:
        ShardError: a file of keys is missing, damaged, or was written with other settings.
    """
    counts, digests, num_keys = [0], [], 0
    for unit in units:
        keys = open_keys(folder, unit)
        if keys.made_with != made_with(config):
            raise ShardError(
                f"{keys_path(folder, unit)} was written with other settings ({keys.made_with}, here "
                f"{made_with(config)}); delete the unit's sidecar, and it is made again"
            )
        counts.append(len(keys.ordinals))
        digests.append(keys.digest)
        num_keys += len(keys.keys)
    return Numbering(folder, tuple(units), np.cumsum(counts, dtype=np.int64)), digests, num_keys


class Documents:
    """Reads columns of documents by number, a unit at a time."""

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self._open = lru_cache(maxsize=_OPEN_UNITS)(lambda unit: open_keys(numbering.folder, unit))

    def open(self, place: int) -> UnitKeys:
        """The keys of the unit at this place of the plan."""
        keys: UnitKeys = self._open(self.numbering.units[place])
        return keys

    def with_keys(self, first: int, stop: int) -> tuple[U64, I64]:
        """Keys in [first, stop) of all units, and the documents that have them, unit after unit."""
        keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for place, start in enumerate(self.numbering.starts[:-1]):
            unit_keys, rows = self.open(place).slice_of(first, stop)
            keys.append(unit_keys.copy())  # a view would keep the file mapped
            numbers.append(rows + start)
        return np.concatenate(keys), np.concatenate(numbers)

    def ids(self, documents: I64) -> U64:
        """Both halves of each id, `(n, 2)`."""
        return self._column("ids", documents)

    def signatures(self, documents: I64) -> NDArray[np.uint16]:
        """Signatures, `(n, num_slots)`."""
        return self._column("signatures", documents)

    def ordinals(self, documents: I64) -> NDArray[np.int32]:
        """Numbers of the documents among the records of their units, `(n,)`."""
        return self._column("ordinals", documents)

    def other_labels(self, kept: I64, copies: I64) -> list[str | None]:
        """The label of each kept document if that of its copy is another, else None, `(n,)`; empty without labels."""
        if not len(kept) or self._label(int(kept[0])) is None:
            return []
        labels: list[str | None] = []
        for document, copy in zip(kept.tolist(), copies.tolist(), strict=True):
            of_kept, of_copy = self._label(document), self._label(copy)
            labels.append(None if of_copy in (None, of_kept) else of_kept)
        return labels

    def _label(self, document: int) -> str | None:
        place = int(self.numbering.units_of(np.array([document], np.int64))[0])
        labels = self.open(place).labels
        return None if labels is None else labels[document - int(self.numbering.starts[place])].as_py()

    def _column(self, name: str, documents: I64) -> NDArray[Any]:
        order = np.argsort(documents, kind="stable")
        ascending = documents[order]
        places = self.numbering.units_of(ascending)
        cuts = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        parts = []
        for start, stop in pairwise(cuts) if len(places) else [(0, 0)]:
            place = int(places[start]) if len(places) else 0
            column: NDArray[Any] = getattr(self.open(place), name)
            parts.append(column[ascending[start:stop] - self.numbering.starts[place]])
        gathered = np.concatenate(parts)
        out = np.empty_like(gathered)
        out[order] = gathered
        return out
