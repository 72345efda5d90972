"""`prepare --plan`: the result and the duration of a preparation, estimated from a stratified sample of the corpus."""

import heapq
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import duration
from declutr.pipeline.job.outcome import lines_hint, nothing_kept
from declutr.pipeline.job.output import Preparation, output_engine
from declutr.pipeline.job.units import RunningCounts, Unit, UnitReader, read_unit
from declutr.pipeline.job.worker import decide_records
from declutr.pipeline.readers.corpus import MIB, Part, ReadFailure, Record, bare_suffix
from declutr.pipeline.shards.content import MEDIA_KINDS, noun_of, size_noun
from declutr.pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Counts
from declutr.pipeline.shards.media import Clip, Image
from declutr.pipeline.shards.writer import UINT16_VOCABULARY
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

MAX_STRATA = 16
_SAMPLED_PARTS = 64
_MIN_PARTS = 4  # sampled parts of a small stratum, because a small file may hold most of the documents
_SAMPLE_SECONDS = 20.0
_LEAST_RECORDS = 256  # records that are read of each sampled part, even if there is no time
_ROW_BYTES = 64  # bytes of a shard row without tokens and windows: id, lengths, offset and a short source
_TEXT_BYTES = 5  # bytes of a short text without its tokens: start and label
SUMS = ("documents", "kept", "num_tokens", "text_bytes", "cpu_seconds", "num_texts", "media_bytes")
"""What is added up over records; `num_texts` are short texts in kept rows, `media_bytes` those of kept media."""
Sums = NDArray[np.float64]


@dataclass
class Sampled:
    """A part in the sample, of which at least the beginning is read."""

    part: Part
    stands_for: float
    """Input bytes of its stratum that it represents."""
    num_bytes: int = 0
    """Input bytes that were read."""
    sums: Sums = field(default_factory=lambda: np.zeros(len(SUMS)))
    """Sums over the records that were read."""


@dataclass
class Stratum:
    """Parts of one folder and one format, and the sampled ones among them, in order."""

    parts: list[Part]
    sampled: list[Sampled]

    @property
    def num_bytes(self) -> int:
        """Input bytes."""
        return sum(part.num_bytes for part in self.parts)

    def totals(self) -> Sums:
        """Estimated sums over the stratum, `(sums,)`."""
        pieces = [sample.sums * (sample.stands_for / max(1, sample.num_bytes)) for sample in self.sampled]
        sums: Sums = np.sum(pieces, axis=0)
        return sums


def draw_strata(parts: Sequence[Part]) -> list[Stratum]:
    """Draws parts by top folder and format, in proportion to the bytes of each stratum but at least a few.

    If there are more than 16 strata, those with the fewest bytes are merged.
    """

    def kind_of(part: Part) -> tuple[str, str]:
        return part.source.partition("/")[0] if "/" in part.source else "", part.format + bare_suffix(part.source)

    parts = [part for part in parts if part.num_bytes]
    sizes = Counter[tuple[str, str]]()
    for part in parts:
        sizes[kind_of(part)] += part.num_bytes
    largest = {kind for kind, _ in sizes.most_common(MAX_STRATA)}
    groups: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in parts:
        kind = kind_of(part)
        groups[kind if kind in largest else ("", kind[1])].append(part)
    total = sum(part.num_bytes for part in parts)
    return [_draw(groups[kind], total) for kind in sorted(groups)]


def _draw(parts: list[Part], total: int) -> Stratum:
    """Draws the middle part of each of some equal groups of neighbours, which it stands for.

    Of whole files, neighbours have about the same size: a file is often one document, so its documents do not follow
    its bytes, and a short one would stand for hundreds.
    """
    count = max(_MIN_PARTS, math.ceil(_SAMPLED_PARTS * sum(part.num_bytes for part in parts) / total))
    count = min(count, len(parts))
    if parts[0].format == "stream":
        parts = sorted(parts, key=lambda part: (part.num_bytes, part.source))
    cuts = [len(parts) * index // count for index in range(count + 1)]
    groups = [parts[start:stop] for start, stop in pairwise(cuts)]
    return Stratum(parts, [Sampled(group[len(group) // 2], sum(part.num_bytes for part in group)) for group in groups])


def read_for(seconds: float, reader: UnitReader, sample: Sampled, failures: list[ReadFailure]) -> Iterator[Record]:
    """The records of a part until the time is over; adds to the bytes of the sample those that they were read from.

    A reader takes its input in pieces, so its consumed bytes are ahead of its records. The two agree when the reader
    requests another piece, so reading ends there.
    """
    began, mark = time.perf_counter(), 0
    for number, record in enumerate(reader):
        now = reader.bytes_read
        if now > mark and number >= _LEAST_RECORDS and time.perf_counter() - began > seconds:
            sample.num_bytes += mark
            return
        mark = now
        if isinstance(record, ReadFailure) and len(failures) < MAX_EXAMPLES:
            failures.append(record)
        yield record
    sample.num_bytes += sample.part.num_bytes


@dataclass(frozen=True)
class Estimate:
    """Totals estimated from a sample. Duplicates and failures of whole files are not included."""

    documents: int
    kept: int
    lines: list[str]
    """The estimate as text."""


def makespan(seconds: Iterable[float], num_cpus: int) -> float:
    """Time of units that take `seconds` of a CPU each; a CPU that is free takes the longest unit that is left."""
    units = sorted(seconds, reverse=True)
    busy = [0.0] * min(num_cpus, max(1, len(units)))
    for unit in units:
        heapq.heapreplace(busy, busy[0] + unit)
    return max(busy)


def _read_sample(
    job: Preparation, folder: Path, tokenizer: TokenizerInfo | None, sampled: Sequence[Sampled]
) -> tuple[Counts, list[ReadFailure]]:
    """Processes the sampled parts like a task for about 20 seconds; adds their bytes and sums to them."""
    config, failures, total = job.config, list[ReadFailure](), sum(sample.stands_for for sample in sampled)
    engine = output_engine(job, folder, job.units)
    decide = partial(decide_records, folder=folder, config=config, tokenizer=tokenizer, engine=engine)
    list(decide(iter(())))  # load the tokenizer before the clock starts
    running = RunningCounts()
    for sample in sampled:
        started, seconds = time.process_time(), _SAMPLE_SECONDS * sample.stands_for / total
        reader = read_unit(Unit(name="00000", parts=[sample.part]), config.corpus, config.content)
        for decision, content in decide(read_for(seconds, reader, sample, failures)):
            entry, kept = decision.entry, content is not None
            running.add(entry, kept)
            num_texts = 0 if decision.layout is None else len(decision.layout.starts)
            media_bytes = content.num_bytes if isinstance(content, Image | Clip) else 0
            num_tokens = (entry.num_tokens or 0) if kept else 0
            sample.sums += [1, kept, num_tokens, entry.text_bytes, 0, num_texts, media_bytes]
        sample.sums[SUMS.index("cpu_seconds")] = time.process_time() - started
    return running.counts(), failures


def estimate(job: Preparation, folder: Path, tokenizer: TokenizerInfo | None, cpus: int | None = None) -> Estimate:
    """Processes parts of the corpus like a task for about 20 seconds and scales up the results by input bytes.

    Each folder and each format is estimated separately (`draw_strata`) from at least a few parts: if small
    files hold most of the documents, large ones say nothing about them. The time is that on `cpus` CPUs, at least 1;
    None: on those of the session, else on all of this machine.

    Raises:
        ConfigError: the engine in tokenizer.engine does not give the same ids.
    """
    config, units, kind = job.config, job.units, job.config.content.kind
    strata = draw_strata([part for unit in units for part in unit.parts])
    sampled = [sample for stratum in strata for sample in stratum.sampled]
    total = sum(stratum.num_bytes for stratum in strata)
    counts, failures = _read_sample(job, folder, tokenizer, sampled)
    if problem := nothing_kept(counts, config, failures):
        get_logger().warning("in the sample: %s", problem)
    totals = [stratum.totals() for stratum in strata]
    sums = dict(zip(SUMS, np.sum([np.zeros(len(SUMS)), *totals], axis=0).tolist(), strict=True))
    rates = {
        (part.source, part.start): float(of_stratum[SUMS.index("cpu_seconds")]) / stratum.num_bytes
        for stratum, of_stratum in zip(strata, totals, strict=True)
        for part in stratum.parts
    }
    of_units = [sum(rates.get((part.source, part.start), 0) * part.num_bytes for part in unit.parts) for unit in units]
    num_cpus = cpus or config.session.num_cpus or os.cpu_count() or 1
    token_bytes = (2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4) if tokenizer else 0
    window_bytes = 4 / config.geometry.max_tokens if kind == "documents" else 0
    shard_bytes = sums["num_tokens"] * (token_bytes + window_bytes) + sums["kept"] * _ROW_BYTES
    shard_bytes += sums["num_texts"] * _TEXT_BYTES + sums["media_bytes"]
    num_bytes = sum(sample.num_bytes for sample in sampled)
    documents, kept, num_tokens = (round(sums[name]) for name in ("documents", "kept", "num_tokens"))
    about = "about " if num_bytes < total else ""
    not_kept = Counter({**counts.dropped, **counts.failed}).most_common()
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in not_kept)
    sources = (part.source for unit in units for part in unit.parts)
    hint = lines_hint(counts.read, counts.dropped, job.plan.config, sources)
    lines = [
        f"estimated from {num_bytes / MIB:,.1f} of {total / MIB:,.1f} MiB of input:",
        f"  {noun_of(kind):11} {about}{documents:,}, of which {about}{kept:,} kept ({kept / max(1, documents):.0%})",
        *([f"  not kept    {reasons} (in the sample)"] if not_kept else []),
        f"  {'files' if kind in MEDIA_KINDS else 'text':11} {sums['text_bytes'] / MIB:,.1f} MiB",
        f"  {size_noun(kind):11} {about}{num_tokens:,} kept",
        f"  shards      up to {len(units) * len(SPLITS):,} files, {shard_bytes / MIB:,.1f} MiB",
        f"  time        {duration(math.ceil(makespan(of_units, num_cpus)))} on {num_cpus} CPUs (and up to a minute for "
        "Ray)",
        *(_scaling(job, of_units, num_cpus) if cpus else []),
        *([f"  hint        {hint}"] if hint else []),
    ]
    return Estimate(documents, kept, lines)


def _scaling(job: Preparation, seconds: Sequence[float], num_cpus: int) -> list[str]:
    """Lines on an estimate for other CPUs: what was measured, what limits the time and what it leaves out."""
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    # A unit is not divided, so the CPUs that shorten the time are at most the total in longest units.
    useful = max(1, math.ceil(sum(seconds) / max(seconds[longest], 1e-9)))
    second = ", the search for duplicates, the second writing of the shards" if job.config.duplicates.enabled else ""
    return [
        f"  measured    on 1 of {os.cpu_count()} CPUs of this machine; estimated for {num_cpus} CPUs of the same speed",
        f"  units       {len(seconds):,}, the longest {duration(math.ceil(seconds[longest]))} of a CPU "
        f"(begins with {job.units[longest].parts[0].source!r}): CPUs beyond about {useful:,} do not shorten the time",
        f"  not counted waits for disks and network{second}",
    ]
