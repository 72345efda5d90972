"""Clusters of duplicates: a kept document and its removed copies."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from declutr.evaluation.report.examples import entries_at
from declutr.evaluation.report.survey import I64, Survey, unit_and_ordinal
from declutr.pipeline.shards.ledger import Entry

_SHOWN_CLUSTERS = 8
_SHOWN_COPIES = 4


@dataclass(frozen=True)
class Cluster:
    """A kept document and the first of its removed copies. `kept` is None where the ledger has no such row."""

    size: int
    """Number of documents, including the kept one."""
    kept: Entry | None
    copies: list[Entry]


@dataclass(frozen=True)
class Clusters:
    """All clusters of a corpus, and the largest ones in full."""

    sizes: I64
    """`(num_clusters,)` documents of each, at least 2."""
    largest: list[Cluster]

    def by_size(self) -> list[tuple[str, int]]:
        """Number of clusters of 2, 3, 4, 5-8, 9-16 ... documents, up to the largest."""
        rows = []
        low = 2
        while low <= (int(self.sizes.max()) if len(self.sizes) else 0):
            high = low if low < 5 else 2 * (low - 1)
            number = int(((self.sizes >= low) & (self.sizes <= high)).sum())
            rows.append((str(low) if low == high else f"{low:,}–{high:,}", number))
            low = high + 1
        return rows


def find_clusters(folder: Path, found: Survey) -> Clusters:
    """Groups the removed duplicates by the document that is kept instead of them."""
    copies, kept = found.copies
    places, groups, counts = np.unique(kept, return_inverse=True, return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:_SHOWN_CLUSTERS]
    members = {int(group): copies[groups == group][:_SHOWN_COPIES].tolist() for group in largest}
    shown = [*places[largest].tolist(), *(place for some in members.values() for place in some)]
    entries = entries_at(folder, map(unit_and_ordinal, shown))
    return Clusters(
        sizes=counts.astype(np.int64) + 1,
        largest=[
            Cluster(
                size=int(counts[group]) + 1,
                kept=entries.get(unit_and_ordinal(int(places[group]))),
                copies=[entries[unit_and_ordinal(place)] for place in members[int(group)]],
            )
            for group in largest
        ],
    )
