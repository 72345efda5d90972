"""Pairs of similar documents in a bucket (groups of equal keys, candidates, verification), and what is dropped.

The work is linear in the size of a group: see `WINDOW` and `LEADERS`.

From the pairs follows which documents are kept. Similarity is not transitive: A ~ B and B ~ C do not imply A ~ C.
Dropping all but one document of a connected component would drop C because of A, which may be quite different, and long
chains (versions of a page, a template with changing contents) would collapse into one document. So the documents are
visited in the order of the corpus, and a document is dropped only if it pairs with an earlier document that was kept. B
is dropped because of A; C, whose only pair is with B, is kept. Every dropped document thus has a kept document that is
similar to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.pipeline.duplicates.config import DuplicatesConfig, NearConfig
from declutr.pipeline.duplicates.documents import I64, U64, Documents

WINDOW = 16
"""Every document is compared with this many documents before it in its group: all pairs only in a small group."""
LEADERS = 64
"""In a larger group, the first document is compared with all others, then the first one that is not similar to it, and
so on, at most this many times."""
_BATCH = 1 << 17  # documents whose signatures are held at a time

_EXACT_BIT = np.uint64(1)


@dataclass(frozen=True)
class DuplicatePairs:
    """Pairs of similar documents, by number, sorted by (later, earlier), without repeats."""

    later: I64
    earlier: I64
    similarity: NDArray[np.float32]
    """1 for equal texts, else the share of equal slots."""
    exact: NDArray[np.bool_]
    """True where the ids are equal."""

    def __len__(self) -> int:
        return len(self.later)


def join(parts: Sequence[DuplicatePairs]) -> DuplicatePairs:
    """All pairs of the parts."""
    later = np.concatenate([part.later for part in parts] or [np.empty(0, np.int64)])
    earlier = np.concatenate([part.earlier for part in parts] or [np.empty(0, np.int64)])
    similarity = np.concatenate([part.similarity for part in parts] or [np.empty(0, np.float32)])
    exact = np.concatenate([part.exact for part in parts] or [np.empty(0, np.bool_)])
    order = np.lexsort((~exact, earlier, later))
    order = order[_first_of_runs(later[order], earlier[order])]
    return DuplicatePairs(later[order], earlier[order], similarity[order], exact[order])


def bucket_pairs(documents: Documents, config: DuplicatesConfig, bucket: int, num_buckets: int) -> DuplicatePairs:
    """The pairs found by the keys of one bucket, [bucket, bucket + 1) * 2**64 / num_buckets.

    Raises:
        ShardError: a file of keys is missing or damaged.
    """
    first, stop = bucket * 2**64 // num_buckets, (bucket + 1) * 2**64 // num_buckets
    keys, numbers = documents.with_keys(first, stop)
    order = np.argsort(keys, kind="stable")  # stable: a group is in the order of the corpus
    keys, numbers = keys[order], numbers[order]
    groups = np.cumsum(_first_of_runs(keys), dtype=np.int64)
    shared = _in_runs(groups)
    near = (keys & _EXACT_BIT).astype(np.bool_)
    parts = []
    if config.exact:
        members = numbers[shared & ~near]
        parts.append(_exact_pairs(members, documents.ids(members)))
    if config.near:
        members, groups = numbers[shared & near], groups[shared & near]
        if config.exact:
            first_of_text = _first_of_text(groups, members, documents.ids(members))
            members, groups = members[first_of_text], groups[first_of_text]
            shared = _in_runs(groups)
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


def _in_runs(groups: I64) -> NDArray[np.bool_]:
    """A mask of the rows that share their group with a neighbour, `(n,)`."""
    first = np.append(_first_of_runs(groups), True)
    alone: NDArray[np.bool_] = first[:-1] & first[1:]
    return ~alone


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
        signatures = documents.signatures(numbers)
        for distance in range(1, min(WINDOW, len(numbers) - 1) + 1):
            same = np.flatnonzero(group[distance:] == group[:-distance])
            # Rows before `start` serve only later rows; the previous batch has compared them with each other.
            same = same[(same + distance >= start - base) & (numbers[same + distance] != numbers[same])]
            equal = _num_equal(signatures, same + distance, same)
            yield _alike(numbers[same + distance], numbers[same], equal, near)


def _large_groups(members: I64, groups: I64) -> Iterator[I64]:
    """Groups that are larger than the window."""
    cuts = np.append(np.flatnonzero(_first_of_runs(groups)), len(groups))
    for index in np.flatnonzero(np.diff(cuts) > WINDOW + 1):
        yield members[cuts[index] : cuts[index + 1]]


def _leader_pairs(members: I64, documents: Documents, near: NearConfig) -> Iterator[DuplicatePairs]:
    """Each document of a group with the first similar leader of the group."""
    leaders: list[int] = []
    signed: list[NDArray[np.uint16]] = []
    for start in range(0, len(members), _BATCH):
        left = members[start : start + _BATCH]
        signatures = documents.signatures(left)
        turn = 0
        while len(left):
            if turn == len(leaders):
                if turn == LEADERS:
                    break
                leaders.append(int(left[0]))
                signed.append(signatures[0].copy())
            equal = np.count_nonzero(signatures == signed[turn], axis=1)
            alike = equal >= _least_equal(near)
            other = alike & (left != leaders[turn])
            yield _alike(left[other], np.full(int(other.sum()), leaders[turn], np.int64), equal[other], near)
            left, signatures = left[~alike], signatures[~alike]
            turn += 1


def _num_equal(signatures: NDArray[np.uint16], first: I64, second: I64) -> I64:
    """Number of equal slots in pairs of rows, `(n,)`."""
    equal = np.empty(len(first), np.int64)
    step = 1 << 14
    for start in range(0, len(first), step):
        rows = slice(start, start + step)
        equal[rows] = np.count_nonzero(signatures[first[rows]] == signatures[second[rows]], axis=1)
    return equal


def _least_equal(near: NearConfig) -> int:
    """Least number of equal slots of two similar documents."""
    return int(np.ceil(near.similarity * near.num_slots - 1e-9))


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
    kept: I64
    """The earliest kept document that is similar to the dropped one."""
    similarity: NDArray[np.float32]
    exact: NDArray[np.bool_]
    """True where the text equals that of the kept document."""
    cluster_size: I64
    """Number of documents that the kept one represents, including itself."""


def decide(pairs: DuplicatePairs) -> Decisions:
    """Drops every document that pairs with an earlier kept one.

    Of equal texts only the first has near pairs (pipeline/duplicates/pairs.py); the others follow its decision.
    """
    near = ~pairs.exact
    dropped, kept, similarity = _near(pairs.later[near], pairs.earlier[near], pairs.similarity[near])
    twins, originals = pairs.later[pairs.exact], pairs.earlier[pairs.exact]
    if len(dropped):
        place = np.minimum(np.searchsorted(dropped, originals), len(dropped) - 1)
        gone = dropped[place] == originals
        twin_kept = np.where(gone, kept[place], originals)
        twin_similarity = np.where(gone, similarity[place], np.float32(1))
    else:
        gone = np.zeros(len(twins), np.bool_)
        twin_kept, twin_similarity = originals, np.ones(len(twins), np.float32)
    all_dropped = np.concatenate([dropped, twins])
    all_kept = np.concatenate([kept, twin_kept])
    order = np.argsort(all_dropped, kind="stable")
    all_kept = all_kept[order]
    leaders, sizes = np.unique(all_kept, return_counts=True)
    return Decisions(
        dropped=all_dropped[order],
        kept=all_kept,
        similarity=np.concatenate([similarity, twin_similarity])[order],
        exact=np.concatenate([np.zeros(len(dropped), np.bool_), ~gone])[order],
        cluster_size=(sizes[np.searchsorted(leaders, all_kept)] + 1).astype(np.int64),
    )


def _near(later: I64, earlier: I64, similarity: NDArray[np.float32]) -> tuple[I64, I64, NDArray[np.float32]]:
    """Dropped documents, the kept documents that replace them, and their similarity, from sorted near pairs.

    The rule is sequential; here it runs in rounds over all documents at once. A document without open or kept earlier
    partners is kept; a document with a kept earlier partner is dropped; settled pairs are removed.
    """
    documents = np.unique(np.concatenate([later, earlier]))
    second, first = np.searchsorted(documents, later), np.searchsorted(documents, earlier)
    state = np.full(len(documents), _OPEN, np.int8)
    waiting = np.zeros(len(documents), np.bool_)
    open_second, open_first = second, first
    while len(open_second):
        waiting[open_second] = True
        state[open_first[~waiting[open_first]]] = _KEPT
        waiting[open_second] = False
        state[open_second[state[open_first] == _KEPT]] = _DROPPED
        unsettled = (state[open_second] == _OPEN) & (state[open_first] == _OPEN)
        open_second, open_first = open_second[unsettled], open_first[unsettled]
    state[state == _OPEN] = _KEPT
    reasons = np.flatnonzero((state[second] == _DROPPED) & (state[first] == _KEPT))
    dropped, where = np.unique(later[reasons], return_index=True)
    chosen = reasons[where]
    return dropped, earlier[chosen], similarity[chosen]
