"""Pairs of similar documents in a bucket: groups of equal keys, candidate pairs in them, verification.

The work is linear in the size of a group: see `WINDOW` and `LEADERS`.
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
        KeysError: a file of keys is missing or damaged.
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
