"""Pairs of similar documents in a bucket (groups of equal keys, candidates, verification), and what is dropped.

The work is linear in the size of a group: see `WINDOW` and `LEADERS`.

From the pairs follows which documents are kept. Similarity is not transitive: A ~ B and B ~ C do not imply A ~ C.
Dropping all but one document of a connected component would drop C because of A, which may be quite different, and long
chains (versions of a page, a template with changing contents) would collapse into one document. So the documents are
visited in the order of the corpus, and a document is dropped only if it pairs with an earlier document that was kept. B
is dropped because of A; C, whose only pair is with B, is kept. Every dropped document thus has a kept document that is
similar to it.

The result is `duplicates.arrow`, one row for every document to drop, sorted by (unit in plan order, ordinal).

| column       | type                    | meaning                                                          |
|--------------|-------------------------|------------------------------------------------------------------|
| unit         | dictionary<string>      | the dropped document's unit                                      |
| ordinal      | int32                   | its number among the unit's records                              |
| kept_unit    | dictionary<string>      | unit of the kept document                                        |
| kept_ordinal | int32                   |                                                                  |
| kept_id      | fixed_size_binary(16)   |                                                                  |
| kind         | dictionary<string>      | exact: equal texts; near: verified to be similar                 |
| similarity   | float                   | 1 for exact, else the share of equal slots                       |
| cluster_size | int64                   | documents that the kept one represents, including itself         |
| kept_label   | string                  | the kept one's label if the copy has another, else null; no      |
|              |                         | column if all labels agree                                       |
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.storage import atomic_file
from declutr.pipeline.duplicates.config import DuplicatesConfig, NearConfig
from declutr.pipeline.duplicates.keys import I64, U64, Documents
from declutr.pipeline.readers.corpus import ID_BYTES

DUPLICATES = "duplicates.arrow"
KINDS = ("near", "exact")
OTHER_LABEL = "duplicate_other_label"  # reason of an exact copy whose label differs from that of the kept row
LABELS = b"labels"  # metadata key for the labels whose rows are kept, as JSON
# Every document is compared with this many documents before it in its group: all pairs only in a small group.
WINDOW = 16
# In a larger group, the first document is compared with all others, then the first one that is not similar to it, and
# so on, at most this many times.
LEADERS = 64
_BATCH = 1 << 17  # documents whose signatures are held at a time
ROUNDS = 64  # rounds of decisions over all documents at once; each settles two documents of a chain

_BAND_BIT = np.uint64(1)  # set in keys of bands, clear in those of texts (pipeline/duplicates/keys.py)


@dataclass(frozen=True)
class DuplicatePairs:
    """Pairs of similar documents, by number, sorted by (later, earlier), without repeats."""

    later: I64
    earlier: I64
    similarity: NDArray[np.float32]  # 1 for equal texts, else the share of equal slots
    exact: NDArray[np.bool_]  # True for pairs of the exact search, whose ids are equal

    def __len__(self) -> int:
        return len(self.later)


COLUMNS = ("later", "earlier", "similarity", "exact")
_NO_PAIRS = DuplicatePairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_))


def join(parts: Sequence[DuplicatePairs]) -> DuplicatePairs:
    """All pairs of the parts."""
    parts = [_NO_PAIRS, *parts]  # `concatenate` needs one, even without parts
    later, earlier, similarity, exact = (np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS)
    order = np.lexsort((~exact, earlier, later))  # an exact pair first, because the first of equal ones stays
    order = order[_first_of_runs(later[order], earlier[order])]
    return DuplicatePairs(later[order], earlier[order], similarity[order], exact[order])


def bucket_pairs(documents: Documents, config: DuplicatesConfig, bucket: int, num_buckets: int) -> DuplicatePairs:
    """The pairs found by the keys of one bucket, [bucket, bucket + 1) * 2**64 / num_buckets."""
    first, stop = bucket * 2**64 // num_buckets, (bucket + 1) * 2**64 // num_buckets
    keys, numbers = documents.with_keys(first, stop)
    order = np.argsort(keys, kind="stable")  # stable: a group is in the order of the corpus
    keys, numbers = keys[order], numbers[order]
    groups = np.cumsum(_first_of_runs(keys), dtype=np.int64)
    shared = np.bincount(groups)[groups] > 1
    near = (keys & _BAND_BIT).astype(np.bool_)
    parts = []
    if config.exact:
        members = numbers[shared & ~near]
        parts.append(_exact_pairs(members, documents.column("ids", members)))
    if config.near:
        members, groups = numbers[shared & near], groups[shared & near]
        if config.exact:
            first_of_text = _first_of_text(groups, members, documents.column("ids", members))
            members, groups = members[first_of_text], groups[first_of_text]
            shared = np.bincount(groups)[groups] > 1
            members, groups = members[shared], groups[shared]
        parts += _window_pairs(members, groups, documents, config.near)
        for group in _large_groups(members, groups):
            parts += _leader_pairs(group, documents, config.near)
    return join(parts)


def _first_of_runs(*columns: NDArray[np.int64] | U64) -> NDArray[np.bool_]:
    """A mask of the rows that differ from the row before, `(n,)`."""
    first = np.ones(len(columns[0]), np.bool_)
    if len(first):
        first[1:] = False
        for column in columns:
            first[1:] |= column[1:] != column[:-1]
    return first


def _exact_pairs(members: I64, ids: U64) -> DuplicatePairs:
    """Each document with the first of the same id."""
    order = np.lexsort((members, ids[:, 1], ids[:, 0]))
    members, ids = members[order], ids[order]
    first = _first_of_runs(ids[:, 0], ids[:, 1])
    earlier = members[np.flatnonzero(first)[np.cumsum(first) - 1]]
    later, earlier = members[~first], earlier[~first]
    return DuplicatePairs(later, earlier, np.ones(len(later), np.float32), np.ones(len(later), np.bool_))


def _first_of_text(groups: I64, members: I64, ids: U64) -> NDArray[np.bool_]:
    """A mask of the first document of each text in a group: equal texts share every group, so one represents all."""
    order = np.lexsort((members, ids[:, 1], ids[:, 0], groups))
    first = np.empty(len(members), np.bool_)
    first[order] = _first_of_runs(groups[order], ids[order, 0], ids[order, 1])
    return first


def _window_pairs(members: I64, groups: I64, documents: Documents, near: NearConfig) -> Iterator[DuplicatePairs]:
    """Each document with the similar ones among the `WINDOW` documents before it in its group."""
    for start in range(0, len(members), _BATCH):
        base = max(0, start - WINDOW)
        numbers, group = members[base : start + _BATCH], groups[base : start + _BATCH]
        signatures = documents.column("signatures", numbers)
        for distance in range(1, min(WINDOW, len(numbers) - 1) + 1):
            same = np.flatnonzero(group[distance:] == group[:-distance])
            # Rows before `start` serve only later rows; the previous batch has compared them with each other.
            same = same[(same + distance >= start - base) & (numbers[same + distance] != numbers[same])]
            equal = _num_equal(signatures, same + distance, same)
            yield _alike(numbers[same + distance], numbers[same], equal, near)


def _large_groups(members: I64, groups: I64) -> Iterator[I64]:
    """Groups that are larger than the window."""
    cuts = np.append(np.flatnonzero(_first_of_runs(groups)), len(groups))
    for index in np.flatnonzero(np.diff(cuts) > WINDOW + 1):  # in others the window has compared all pairs
        yield members[cuts[index] : cuts[index + 1]]


def _leader_pairs(members: I64, documents: Documents, near: NearConfig) -> Iterator[DuplicatePairs]:
    """Each document of a group with the first similar leader of the group."""
    leaders: list[int] = []
    signed: list[NDArray[np.uint16]] = []
    for start in range(0, len(members), _BATCH):
        left = members[start : start + _BATCH]
        signatures = documents.column("signatures", left)
        turn = 0
        while len(left):
            if turn == len(leaders):
                if turn == LEADERS:
                    break
                leaders.append(int(left[0]))
                signed.append(signatures[0].copy())  # a view would keep the batch
            equal = np.count_nonzero(signatures == signed[turn], axis=1)
            alike = equal >= _least_equal(near)
            other = alike & (left != leaders[turn])
            yield _alike(left[other], np.full(int(other.sum()), leaders[turn], np.int64), equal[other], near)
            left, signatures = left[~alike], signatures[~alike]
            turn += 1


def _num_equal(signatures: NDArray[np.uint16], first: I64, second: I64) -> I64:
    """Number of equal slots in pairs of rows, `(n,)`."""
    equal = np.empty(len(first), np.int64)
    step = 1 << 14  # bounds the two gathered copies
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        equal[rows] = np.count_nonzero(signatures[first[rows]] == signatures[second[rows]], axis=1)
    return equal


def _least_equal(near: NearConfig) -> int:
    """Least number of equal slots of two similar documents."""
    return int(np.ceil(near.similarity * near.num_slots - 1e-9))  # 0.55 * 100 is more than 55 in floats


def _alike(later: I64, earlier: I64, equal: I64, near: NearConfig) -> DuplicatePairs:
    """The candidates with enough equal slots."""
    alike = equal >= _least_equal(near)
    similarity = (equal[alike] / near.num_slots).astype(np.float32)
    return DuplicatePairs(later[alike], earlier[alike], similarity, np.zeros(len(similarity), np.bool_))


_OPEN, _KEPT, _DROPPED = 0, 1, 2


@dataclass(frozen=True)
class Decisions:
    """The documents to drop, by number, ascending; all arrays `(num_dropped,)`."""

    dropped: I64
    kept: I64  # the earliest kept document that is similar to the dropped one
    similarity: NDArray[np.float32]
    exact: NDArray[np.bool_]  # True where the text equals that of the kept document
    cluster_size: I64  # number of documents that the kept one represents, including itself


def decide(pairs: DuplicatePairs) -> Decisions:
    """Drops documents that pair with an earlier kept one; of equal texts the first decides for all."""
    near = ~pairs.exact
    dropped, kept, similarity = _decide_near(pairs.later[near], pairs.earlier[near], pairs.similarity[near])
    # A twin of a dropped original gets the original's kept document and similarity.
    twins, originals = pairs.later[pairs.exact], pairs.earlier[pairs.exact]
    original_dropped = np.isin(originals, dropped)
    place = np.searchsorted(dropped, originals[original_dropped])
    twin_kept, twin_similarity = originals.copy(), np.ones(len(twins), np.float32)
    twin_kept[original_dropped], twin_similarity[original_dropped] = kept[place], similarity[place]
    all_dropped = np.concatenate([dropped, twins])
    all_kept = np.concatenate([kept, twin_kept])
    order = np.argsort(all_dropped, kind="stable")
    all_kept = all_kept[order]
    leaders, sizes = np.unique(all_kept, return_counts=True)
    return Decisions(
        dropped=all_dropped[order],
        kept=all_kept,
        similarity=np.concatenate([similarity, twin_similarity])[order],
        exact=np.concatenate([np.zeros(len(dropped), np.bool_), ~original_dropped])[order],
        cluster_size=(sizes[np.searchsorted(leaders, all_kept)] + 1).astype(np.int64),
    )


def _decide_near(later: I64, earlier: I64, similarity: NDArray[np.float32]) -> tuple[I64, I64, NDArray[np.float32]]:
    """Dropped documents, the kept documents that replace them, and their similarity, from sorted near pairs.

    The rule is sequential; here it runs in rounds over all documents at once. A document without open or kept earlier
    partners is kept; a document with a kept earlier partner is dropped; settled pairs are removed.
    """
    documents = np.unique(np.concatenate([later, earlier]))
    second, first = np.searchsorted(documents, later), np.searchsorted(documents, earlier)
    state = np.full(len(documents), _OPEN, np.int8)
    waiting = np.zeros(len(documents), np.bool_)
    open_second, open_first = second, first
    for _ in range(ROUNDS):
        waiting[open_second] = True  # while an earlier partner is open
        state[open_first[~waiting[open_first]]] = _KEPT
        waiting[open_second] = False
        state[open_second[state[open_first] == _KEPT]] = _DROPPED
        unsettled = (state[open_second] == _OPEN) & (state[open_first] == _OPEN)
        open_second, open_first = open_second[unsettled], open_first[unsettled]
    for number, partner in zip(open_second.tolist(), open_first.tolist(), strict=True):  # of long chains, in order
        if state[partner] == _OPEN:  # all its own pairs were before this one, so it is kept
            state[number] = _DROPPED
    state[state == _OPEN] = _KEPT
    reasons = np.flatnonzero((state[second] == _DROPPED) & (state[first] == _KEPT))
    dropped, where = np.unique(later[reasons], return_index=True)
    chosen = reasons[where]
    return dropped, earlier[chosen], similarity[chosen]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A document to drop, and the kept document that it duplicates."""

    unit: str
    ordinal: int
    kept_unit: str
    kept_ordinal: int
    kept_id: bytes
    kind: Literal["exact", "near"]
    similarity: float
    cluster_size: int
    kept_label: str | None = None  # the kept one's label if it differs


def write_duplicates(
    path: Path, decisions: Decisions, documents: Documents, stamp: str, labels: list[str] | None = None
) -> None:
    """Writes the whole table; its metadata: `stamp` (hash of keys and settings), and kept labels, if not all are."""
    units = pa.array(documents.units, pa.string())
    kinds = pa.array(KINDS, pa.string())
    ids = np.ascontiguousarray(documents.column("ids", decisions.kept))
    count = len(decisions.dropped)
    columns = {
        "unit": _coded(documents.units_of(decisions.dropped), units),
        "ordinal": pa.array(documents.column("ordinals", decisions.dropped)),
        "kept_unit": _coded(documents.units_of(decisions.kept), units),
        "kept_ordinal": pa.array(documents.column("ordinals", decisions.kept)),
        "kept_id": pa.Array.from_buffers(pa.binary(ID_BYTES), count, [None, pa.py_buffer(ids)]),
        "kind": pa.DictionaryArray.from_arrays(pa.array(decisions.exact.astype(np.int8)), kinds),
        "similarity": pa.array(decisions.similarity),
        "cluster_size": pa.array(decisions.cluster_size),
    }
    labels_of_kept, labels_of_copies = (
        documents.column("labels", rows) for rows in (decisions.kept, decisions.dropped)
    )
    pairs = zip(labels_of_kept.tolist(), labels_of_copies.tolist(), strict=True)
    if any(other_labels := [None if copy in (None, kept) else kept for kept, copy in pairs]):
        columns["kept_label"] = pa.array(other_labels, pa.string())
    batch = pa.record_batch(columns)
    kept_labels = {} if labels is None else {LABELS: json.dumps(labels)}
    batch = batch.replace_schema_metadata({b"stamp": stamp, **kept_labels})
    with atomic_file(path) as aside, pa.ipc.new_file(str(aside), batch.schema) as stream:
        stream.write_batch(batch)


def _coded(places: I64, names: pa.Array) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names)


def removed(folder: Path, unit: str) -> tuple[dict[int, Duplicate], frozenset[str] | None]:
    """From its rows alone: what a unit drops, by ordinal, and the labels whose rows are kept (None: all)."""
    batch = pa.ipc.open_file(pa.memory_map(str(folder / DUPLICATES))).get_batch(0)
    labels_json = (batch.schema.metadata or {}).get(LABELS)
    labels = None if labels_json is None else frozenset(json.loads(labels_json))
    column = batch.column("unit")
    place = column.dictionary.index(unit).as_py()
    if place < 0:
        return {}, labels
    codes = column.indices.to_numpy(zero_copy_only=True)
    start, stop = np.searchsorted(codes, [place, place + 1])  # rows are in the order of the corpus
    return {row["ordinal"]: Duplicate(**row) for row in batch.slice(start, stop - start).to_pylist()}, labels
