"""A sample of a corpus by kinds of files: parts of each folder and each format, read in bites whose size is known."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from pipeline.job.units import Reading
from pipeline.readers.corpus import Document, Part, Record
from pipeline.readers.names import bare_suffix

MAX_STRATA = 16
SAMPLED_PARTS = 64
LEAST_PARTS = 4
"""Of each stratum, however small its share: a small file may hold most of the documents."""
_BITE_DOCUMENTS = 256
_BITE_CHARACTERS = 1_000_000
_UNKNOWN_SPREAD = 0.3
"""Standard deviation of a rate, as a share of it, where one bite of a part is all that was read."""


@dataclass(frozen=True)
class Found:
    """Sums over what was read, or over what that stands for."""

    documents: float = 0
    kept: float = 0
    num_tokens: float = 0
    text_bytes: float = 0
    cpu_seconds: float = 0

    def __add__(self, other: "Found") -> "Found":
        return Found(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> "Found":
        return Found(*(value * factor for value in astuple(self)))


@dataclass
class Sampled:
    """A part of the sample.

    Attributes:
        part: what is read, at least its beginning.
        stands_for: input bytes of its stratum that it represents.
        bites: what was found, and in how many input bytes, in order.
    """

    part: Part
    stands_for: float
    bites: list[tuple[Found, int]]

    @property
    def num_bytes(self) -> int:
        """Input bytes that were read."""
        return sum(size for _, size in self.bites)

    def estimate(self) -> Found:
        """Sums over the bytes that it stands for."""
        return sum((found for found, _ in self.bites), Found()) * (self.stands_for / max(1, self.num_bytes))


@dataclass
class Stratum:
    """Parts of one folder and one format, of which some are sampled."""

    parts: list[Part]
    sampled: list[Sampled]

    @property
    def num_bytes(self) -> int:
        """Input bytes of all its parts."""
        return sum(part.num_bytes for part in self.parts)

    def estimate(self) -> Found:
        """Sums over all of its parts."""
        return sum((one.estimate() for one in self.sampled), Found())

    def variance(self) -> Found:
        """Variances of `estimate`: between parts, as far as not all were read, and within those read in part."""
        totals = np.array([astuple(one.estimate()) for one in self.sampled])
        found = np.zeros(totals.shape[1])
        count = len(self.sampled)
        if len(self.parts) > count:
            shares = np.array([one.stands_for for one in self.sampled])[:, None]
            rates = totals / np.maximum(1, shares)
            spread = rates.var(axis=0, ddof=1) if count > 1 else (_UNKNOWN_SPREAD * rates[0]) ** 2
            found += self.num_bytes**2 * spread / count * (1 - count / len(self.parts))
        for one, total in zip(self.sampled, totals, strict=True):
            unread = max(0.0, 1 - one.num_bytes / max(1, one.part.num_bytes))
            sizes = np.array([size for _, size in one.bites], dtype=float)
            if unread and len(sizes) > 1:
                rates = np.array([astuple(bite) for bite, _ in one.bites]) / np.maximum(1, sizes)[:, None]
                found += one.stands_for**2 * rates.var(axis=0, ddof=1) / len(sizes) * unread
            elif unread:
                found += (_UNKNOWN_SPREAD * total) ** 2 * unread
        return Found(*found.tolist())


def draw_strata(parts: Sequence[Part]) -> list[Stratum]:
    """Parts to read, by top folder and format; of each stratum as its bytes ask for, and at least a few.

    Where there are more than 16 strata, the folders with the fewest bytes are taken together.
    """
    parts = [part for part in parts if part.num_bytes]
    sizes = Counter[tuple[str, str]]()
    for part in parts:
        sizes[_kind(part)] += part.num_bytes
    own = {kind for kind, _ in sizes.most_common(MAX_STRATA)}
    groups: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in parts:
        kind = _kind(part)
        groups[kind if kind in own else ("", kind[1])].append(part)
    total = sum(part.num_bytes for part in parts)
    return [_draw(groups[kind], total) for kind in sorted(groups)]


def bites(reading: Reading, num_bytes: int) -> Iterator[tuple[list[Record], int]]:
    """The records of a part, some at a time, and how many input bytes they were read from.

    A reader takes its input in pieces, so what it consumed is ahead of the records it gave. The two agree at the moment
    at which it asks for another piece: there a bite ends.
    """
    held: list[Record] = []
    before = mark = characters = 0
    for record in reading:
        now = reading.bytes_read
        if now > mark and (len(held) >= _BITE_DOCUMENTS or characters >= _BITE_CHARACTERS):
            yield held, mark - before
            held, before, characters = [], mark, 0
        mark = now
        held.append(record)
        characters += len(record.text) if isinstance(record, Document) else 0
    yield held, num_bytes - before


def _kind(part: Part) -> tuple[str, str]:
    """Top folder and format of a part's file."""
    return part.source.partition("/")[0] if "/" in part.source else "", part.format + bare_suffix(part.source)


def _draw(parts: list[Part], total: int) -> Stratum:
    """Evenly over the bytes of a stratum, the beginning of its order among them."""
    mine = sum(part.num_bytes for part in parts)
    count = max(LEAST_PARTS, math.ceil(SAMPLED_PARTS * mine / total))
    if len(parts) <= count:
        return Stratum(parts, [Sampled(part, part.num_bytes, []) for part in parts])
    ends = np.cumsum([part.num_bytes for part in parts])
    places = (np.arange(count) + 0.5) * (mine / count)
    drawn, times = np.unique(np.searchsorted(ends, places, side="right"), return_counts=True)
    sampled = [Sampled(parts[index], mine * many / count, []) for index, many in zip(drawn, times, strict=True)]
    return Stratum(parts, sampled)
