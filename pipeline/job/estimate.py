"""Estimate of the result and duration of a preparation from a sample."""

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import duration
from declutr.pipeline.config import PipelineConfig, identity
from declutr.pipeline.job.outcome import lines_hint, nothing_kept
from declutr.pipeline.job.sample import output_engine
from declutr.pipeline.job.unit_writer import Decision, RunningCounts
from declutr.pipeline.job.units import Unit, UnitReader, read_unit
from declutr.pipeline.job.worker import decide_records
from declutr.pipeline.readers.corpus import MIB, Document, Part, ReadFailure, Record, bare_suffix
from declutr.pipeline.shards.content import ContentKind, bytes_noun, noun_of, size_noun
from declutr.pipeline.shards.manifest import SPLITS
from declutr.pipeline.shards.media import Clip, Image, Media
from declutr.pipeline.shards.schema import UINT16_VOCABULARY
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

# A stratified sample of a corpus: parts of each folder and each format.
#
# A part is read in chunks: a few records with the number of their input bytes.

MAX_STRATA = 16
SAMPLED_PARTS = 64
LEAST_PARTS = 4
"""Least number of sampled parts of a stratum, because a small file may hold most of the documents."""
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 1_000_000
_UNKNOWN_SPREAD = 0.3
"""Assumed relative standard deviation of a rate if only one chunk of a part was read."""


SUMS = ("documents", "kept", "num_tokens", "text_bytes", "cpu_seconds", "num_texts", "media_bytes")
"""What is added up over records; `num_texts` are short texts in kept rows, `media_bytes` those of kept media."""
Sums = NDArray[np.float64]


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
    chunks: list[tuple[Sums, int]]

    @property
    def num_bytes(self) -> int:
        """Input bytes that were read."""
        return sum(size for _, size in self.chunks)

    def pieces(self) -> Sums:
        """`(chunks, sums)` of the bytes that the part represents."""
        return np.array([sums for sums, _ in self.chunks]) * (self.stands_for / max(1, self.num_bytes))


@dataclass
class Stratum:
    """Parts of one folder and one format, and the sampled ones among them, in order."""

    parts: list[Part]
    sampled: list[Sampled]

    @property
    def num_bytes(self) -> int:
        """Input bytes of all its parts."""
        return sum(part.num_bytes for part in self.parts)

    def estimate(self) -> Sums:
        """Estimated sums over all of its parts."""
        total: Sums = np.concatenate([sample.pieces() for sample in self.sampled]).sum(axis=0)
        return total

    def variance(self) -> Sums:
        """Variances of `estimate`, from successive differences of parts, or of the chunks of an only one.

        Neighbours are alike: they follow each other in a folder or a file, or have about the same size.
        """
        pieces = np.array([sample.pieces().sum(axis=0) for sample in self.sampled])
        if len(pieces) == 1:
            pieces = self.sampled[0].pieces()
        unread = max(0.0, 1 - sum(sample.num_bytes for sample in self.sampled) / self.num_bytes)
        if len(pieces) == 1:
            variances: Sums = (_UNKNOWN_SPREAD * pieces[0]) ** 2 * unread
        else:
            number = len(pieces)
            variances = number / (number - 1) / 2 * (np.diff(pieces, axis=0) ** 2).sum(axis=0) * unread
        return variances


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
    chunk: list[Record] = []
    before = mark = characters = 0
    for record in reader:
        now = reader.bytes_read
        if now > mark and (len(chunk) >= _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS):
            yield chunk, mark - before
            chunk, before, characters = [], mark, 0
        mark = now
        chunk.append(record)
        characters += len(record.text) if isinstance(record, Document) else 0
    yield chunk, num_bytes - before


def _kind(part: Part) -> tuple[str, str]:
    """Top folder and format of a part's file."""
    return part.source.partition("/")[0] if "/" in part.source else "", part.format + bare_suffix(part.source)


def _draw(parts: list[Part], total: int) -> Stratum:
    """Draws parts evenly over the bytes of a stratum; of whole files, one for each group of about the same size.

    A file is often one document, so its documents do not follow its bytes: a short one drawn by bytes would stand for
    hundreds.
    """
    num_bytes = sum(part.num_bytes for part in parts)
    count = max(LEAST_PARTS, math.ceil(SAMPLED_PARTS * num_bytes / total))
    if len(parts) <= count:
        return Stratum(parts, [Sampled(part, part.num_bytes, []) for part in parts])
    if parts[0].format == "stream":
        ordered = sorted(parts, key=lambda part: (part.num_bytes, part.source))
        cuts = [len(ordered) * index // count for index in range(count + 1)]
        groups = [ordered[start:stop] for start, stop in pairwise(cuts)]
        middles = [(group[len(group) // 2], sum(part.num_bytes for part in group)) for group in groups]
        return Stratum(parts, [Sampled(part, size, []) for part, size in middles])
    ends = np.cumsum([part.num_bytes for part in parts])
    places = (np.arange(count) + 0.5) * (num_bytes / count)
    drawn, times = np.unique(np.searchsorted(ends, places, side="right"), return_counts=True)
    sampled = [Sampled(parts[index], num_bytes * many / count, []) for index, many in zip(drawn, times, strict=True)]
    return Stratum(parts, sampled)


_SAMPLE_SECONDS = 20.0
_RANGED = ("documents", "kept", "num_tokens", "text_bytes")
"""Estimates that are shown with a range."""
_ROW_BYTES = 64
"""Bytes of a shard row without tokens and windows: id, lengths, offset and a short source."""
_TEXT_BYTES = 5
"""Bytes of a short text without its tokens: start and label."""


@dataclass(frozen=True)
class Estimate:
    """Totals estimated from a sample. Duplicates and failures of whole files are not included."""

    sampled_bytes: int
    """Input bytes that were read."""
    input_bytes: int
    documents: int
    kept: int
    num_tokens: int
    text_bytes: int
    shards: int
    """Largest number of shards: units times splits."""
    shard_bytes: int
    num_cpus: int
    """CPUs for which `seconds` holds: session.num_cpus, or all CPUs of this machine."""
    seconds: float
    """Duration on `num_cpus` CPUs, without Ray's start."""
    deviations: dict[str, float]
    """Standard deviations of the estimates, by name."""
    not_kept: dict[str, int]
    """Documents of the sample that are not kept, by reason, the most frequent first."""
    hint: str | None
    """Setting that would keep more of them."""
    kind: ContentKind
    """Kind of the rows."""

    def lines(self) -> list[str]:
        """The estimate as text."""
        kept = f"of which {self.kept:,} kept{self._range('kept')} ({self.kept / max(1, self.documents):.0%})"
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.not_kept.items())
        return [
            f"estimated from {self.sampled_bytes / MIB:,.1f} of {self.input_bytes / MIB:,.1f} MiB of input:",
            f"  {noun_of(self.kind):11} {self.documents:,}{self._range('documents')}, {kept}",
            *([f"  not kept    {reasons} (in the sample)"] if self.not_kept else []),
            f"  {bytes_noun(self.kind):11} {self.text_bytes / MIB:,.1f} MiB",
            f"  {size_noun(self.kind):11} {self.num_tokens:,} kept{self._range('num_tokens')}",
            f"  shards      up to {self.shards:,} files, {self.shard_bytes / MIB:,.1f} MiB",
            f"  time        {duration(math.ceil(self.seconds))} on {self.num_cpus} CPUs (and up to a minute for Ray)",
            *([f"  hint        {self.hint}"] if self.hint else []),
        ]

    def bounds(self, name: str) -> tuple[int, int] | None:
        """A range of two standard deviations to each side; None if the whole input was read."""
        if not (deviation := self.deviations.get(name)):
            return None
        value = getattr(self, name)
        return max(0, round(value - 2 * deviation)), round(value + 2 * deviation)

    def _range(self, name: str) -> str:
        bounds = self.bounds(name)
        return f" ({bounds[0]:,} to {bounds[1]:,})" if bounds and bounds[0] < bounds[1] else ""


def estimate(config: PipelineConfig, folder: Path, units: Sequence[Unit], tokenizer: TokenizerInfo | None) -> Estimate:
    """Processes parts of the corpus like a task for about 20 seconds and scales up the results by input bytes.

    Each folder and each format is estimated separately (`draw_strata`) from at least a few parts: if small
    files hold most of the documents, large ones say nothing about them.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
    """
    engine = output_engine(config, folder, units)
    decide = partial(decide_records, folder=folder, config=config, tokenizer=tokenizer, engine=engine)
    list(decide(iter(())))  # load the tokenizer before the clock starts
    seen = RunningCounts()
    failures: list[ReadFailure] = []
    strata = draw_strata([part for unit in units for part in unit.parts])
    total = sum(stratum.num_bytes for stratum in strata)
    for stratum in strata:
        for sample in stratum.sampled:
            began, started = time.perf_counter(), time.process_time()
            reader = read_unit(Unit(name="00000", parts=[sample.part]), config.corpus, config.content)
            for records, num_bytes in chunks(reader, sample.part.num_bytes):
                failures += [record for record in records if isinstance(record, ReadFailure)][:1]
                chunk = _sums_of(decide(iter(records)), seen)
                now = time.process_time()
                chunk[SUMS.index("cpu_seconds")], started = now - started, now
                sample.chunks.append((chunk, num_bytes))
                if time.perf_counter() - began > _SAMPLE_SECONDS * sample.stands_for / total:
                    break
    counts = seen.counts()
    if problem := nothing_kept(counts, config, failures):
        get_logger().warning("in the sample: %s", problem)
    sums, variances = (
        dict(zip(SUMS, np.sum([np.zeros(len(SUMS)), *map(part, strata)], axis=0).tolist(), strict=True))
        for part in (Stratum.estimate, Stratum.variance)
    )
    num_cpus = config.session.num_cpus or os.cpu_count() or 1
    token_bytes = (2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4) if tokenizer else 0
    window_bytes = 4 / config.geometry.max_tokens if config.content.kind == "documents" else 0
    return Estimate(
        sampled_bytes=sum(sample.num_bytes for stratum in strata for sample in stratum.sampled),
        input_bytes=total,
        documents=round(sums["documents"]),
        kept=round(sums["kept"]),
        num_tokens=round(sums["num_tokens"]),
        text_bytes=round(sums["text_bytes"]),
        shards=len(units) * len(SPLITS),
        shard_bytes=round(sums["num_tokens"] * (token_bytes + window_bytes) + sums["kept"] * _ROW_BYTES)
        + round(sums["num_texts"] * _TEXT_BYTES + sums["media_bytes"]),
        num_cpus=num_cpus,
        seconds=max(sums["cpu_seconds"] / num_cpus, _longest_unit(units, strata)),
        not_kept=dict(Counter({**counts.dropped, **counts.failed}).most_common()),
        hint=lines_hint(
            counts.read, counts.dropped, identity(config), (part.source for unit in units for part in unit.parts)
        ),
        kind=config.content.kind,
        deviations={name: round(math.sqrt(variances[name]), 3) for name in _RANGED},
    )


def _longest_unit(units: Sequence[Unit], strata: Sequence[Stratum]) -> float:
    """Seconds of the longest unit, which more CPUs cannot shorten."""
    rates: dict[tuple[str, int], float] = {}
    for stratum in strata:
        rate = stratum.estimate()[SUMS.index("cpu_seconds")] / stratum.num_bytes
        rates |= {(part.source, part.start): rate for part in stratum.parts}
    costs = (sum(rates.get((part.source, part.start), 0) * part.num_bytes for part in unit.parts) for unit in units)
    return max(costs, default=0)


def _sums_of(records: Iterable[tuple[Decision, NDArray[np.uint32] | Media | None]], seen: RunningCounts) -> Sums:
    """Sums over some records, without their time; counts their statuses in `seen`."""
    sums = np.zeros(len(SUMS))
    for decision, content in records:
        kept, entry = content is not None, decision.entry
        num_texts = 0 if decision.layout is None else len(decision.layout.starts)
        media_bytes = content.num_bytes if isinstance(content, Image | Clip) else 0
        sums += [1, kept, (entry.num_tokens or 0) if kept else 0, entry.text_bytes, 0, num_texts, media_bytes]
        seen.add(entry, kept)
    return sums
