"""A stratified sample of a corpus: parts of each folder and each format.

A part is read in chunks: a few records with the number of their input bytes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import numpy as np

from declutr.pipeline.job.units import UnitReader
from declutr.pipeline.readers.corpus import Document, Part, Record
from declutr.pipeline.readers.names import bare_suffix

MAX_STRATA = 16
SAMPLED_PARTS = 64
LEAST_PARTS = 4
"""Least number of sampled parts of a stratum, because a small file may hold most of the documents."""
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 1_000_000
_UNKNOWN_SPREAD = 0.3
"""Assumed relative standard deviation of a rate if only one chunk of a part was read."""


@dataclass(frozen=True)
class SampleTotals:
    """Sums over the sample, or estimated sums over the input that it represents."""

    documents: float = 0
    kept: float = 0
    num_tokens: float = 0
    text_bytes: float = 0
    cpu_seconds: float = 0
    num_texts: float = 0
    """Short texts in kept rows; 0 for documents."""
    media_bytes: float = 0
    """Bytes of kept images and clips."""

    def __add__(self, other: "SampleTotals") -> "SampleTotals":
        return SampleTotals(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> "SampleTotals":
        return SampleTotals(*(value * factor for value in astuple(self)))


@dataclass
class Sampled:
    """A part in the sample.

    Attributes:
        part: the part, of which at least the beginning is read.
        stands_for: input bytes of its stratum that it represents.
        chunks: sums and input bytes of each chunk, in order.
    """

    part: Part
    stands_for: float
    chunks: list[tuple[SampleTotals, int]]

    @property
    def num_bytes(self) -> int:
        """Input bytes that were read."""
        return sum(size for _, size in self.chunks)

    def estimate(self) -> SampleTotals:
        """Estimated sums over the bytes that it represents."""
        return sum((found for found, _ in self.chunks), SampleTotals()) * (self.stands_for / max(1, self.num_bytes))


@dataclass
class Stratum:
    """Parts of one folder and one format, and the sampled ones among them."""

    parts: list[Part]
    sampled: list[Sampled]
    by_size: bool = False
    """Each sampled part stands for those of about its size, in the order of size."""

    @property
    def num_bytes(self) -> int:
        """Input bytes of all its parts."""
        return sum(part.num_bytes for part in self.parts)

    def estimate(self) -> SampleTotals:
        """Estimated sums over all of its parts."""
        return sum((one.estimate() for one in self.sampled), SampleTotals())

    def variance(self) -> SampleTotals:
        """Variances of `estimate`: between parts, if not all were read, and within partly read ones."""
        totals = np.array([astuple(one.estimate()) for one in self.sampled])
        found = np.zeros(totals.shape[1])
        count = len(self.sampled)
        if len(self.parts) > count:
            shares = np.array([one.stands_for for one in self.sampled])[:, None]
            rates = totals / np.maximum(1, shares)
            spread = rates.var(axis=0, ddof=1) if count > 1 else (_UNKNOWN_SPREAD * rates[0]) ** 2
            between = self.num_bytes**2 * spread / count
            if self.by_size and count > 1:  # neighbours are of nearly the same size
                between = (np.diff(totals, axis=0) ** 2).sum(axis=0) / 2
            found += between * (1 - count / len(self.parts))
        for one, total in zip(self.sampled, totals, strict=True):
            unread = max(0.0, 1 - one.num_bytes / max(1, one.part.num_bytes))
            sizes = np.array([size for _, size in one.chunks], dtype=float)
            if unread and len(sizes) > 1:
                rates = np.array([astuple(chunk) for chunk, _ in one.chunks]) / np.maximum(1, sizes)[:, None]
                found += one.stands_for**2 * rates.var(axis=0, ddof=1) / len(sizes) * unread
            elif unread:
                found += (_UNKNOWN_SPREAD * total) ** 2 * unread
        return SampleTotals(*found.tolist())


def draw_strata(parts: Sequence[Part]) -> list[Stratum]:
    """Draws parts by top folder and format, in proportion to the bytes of each stratum but at least a few.

    If there are more than 16 strata, those with the fewest bytes are merged.
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


def chunks(reader: UnitReader, num_bytes: int) -> Iterator[tuple[list[Record], int]]:
    """The records of a part in chunks, each with the number of input bytes that it was read from.

    A reader takes its input in pieces, so its consumed bytes are ahead of its records. The two agree when the reader
    requests another piece, so a chunk ends there.
    """
    held: list[Record] = []
    before = mark = characters = 0
    for record in reader:
        now = reader.bytes_read
        if now > mark and (len(held) >= _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS):
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
    """Draws parts evenly over the bytes of a stratum; of whole files, one for each group of about the same size.

    A file is often one document, so its documents do not follow its bytes: a short one drawn by bytes would stand for
    hundreds.
    """
    mine = sum(part.num_bytes for part in parts)
    count = max(LEAST_PARTS, math.ceil(SAMPLED_PARTS * mine / total))
    if len(parts) <= count:
        return Stratum(parts, [Sampled(part, part.num_bytes, []) for part in parts])
    if parts[0].format == "stream":
        ordered = sorted(parts, key=lambda part: (part.num_bytes, part.source))
        cuts = [len(ordered) * index // count for index in range(count + 1)]
        groups = [ordered[start:stop] for start, stop in pairwise(cuts)]
        middles = [(group[len(group) // 2], sum(part.num_bytes for part in group)) for group in groups]
        return Stratum(parts, [Sampled(part, size, []) for part, size in middles], by_size=True)
    ends = np.cumsum([part.num_bytes for part in parts])
    places = (np.arange(count) + 0.5) * (mine / count)
    drawn, times = np.unique(np.searchsorted(ends, places, side="right"), return_counts=True)
    sampled = [Sampled(parts[index], mine * many / count, []) for index, many in zip(drawn, times, strict=True)]
    return Stratum(parts, sampled)
