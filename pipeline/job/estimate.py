"""`prepare --plan`: the result and the duration of a preparation, estimated from a sample of the corpus."""

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
from declutr.pipeline.job.outcome import in_words, lines_hint, nothing_kept
from declutr.pipeline.job.output import Preparation, output_engine
from declutr.pipeline.job.units import Unit, UnitReader
from declutr.pipeline.job.worker import decide_records
from declutr.pipeline.readers.corpus import MIB, Part, ReadFailure, Record, bare_suffix
from declutr.pipeline.shards.content import MEDIA_KINDS, noun_of, size_noun
from declutr.pipeline.shards.manifest import MAX_EXAMPLES, SPLITS, Counts, sum_counts
from declutr.pipeline.shards.media import Clip, Image
from declutr.pipeline.shards.writer import UINT16_VOCABULARY
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

_SAMPLED_PARTS = 64
_MIN_PARTS = 4  # sampled parts of a kind, because its few bytes may hold most of the documents
_SAMPLE_SECONDS = 20.0
_LEAST_RECORDS = 256  # records that are read of each sampled part, even if there is no time
_ROW_BYTES = 64  # bytes of a shard row without tokens and windows: id, lengths, offset and a short source
_TEXT_BYTES = 5  # bytes of a short text without its tokens: start and label
SUMS = ("documents", "kept", "num_tokens", "text_bytes", "cpu_seconds", "num_texts", "media_bytes")
"""What is added up over records; `num_texts` are short texts in kept rows, `media_bytes` those of kept media."""
Sums = NDArray[np.float64]


@dataclass
class Sample:
    """Parts of one format and about one size; the beginning of the middle one is read and stands for all of them."""

    parts: list[Part]
    num_bytes: int = 0  # input bytes that were read
    sums: Sums = field(default_factory=lambda: np.zeros(len(SUMS)))  # sums over the records that were read

    @property
    def part(self) -> Part:
        """The part that is read."""
        return self.parts[len(self.parts) // 2]

    @property
    def stands_for(self) -> int:
        """Input bytes of all its parts."""
        return sum(part.num_bytes for part in self.parts)


def draw_samples(parts: Sequence[Part]) -> list[Sample]:
    """Groups parts by format and size, with groups in proportion to the bytes of each kind but at least a few.

    Small files may hold most of the documents, so large ones do not stand for them. Of whole files, which are often one
    document each, neighbours have about the same size, or a short one would stand for hundreds.
    """
    kinds: dict[tuple[str, int], list[Part]] = defaultdict(list)
    for part in parts:
        if part.num_bytes:
            # Sizes of a kind differ by a factor of less than 4, so the number of kinds is bounded by that of formats.
            kinds[part.format + bare_suffix(part.source), part.num_bytes.bit_length() // 2].append(part)
    total, samples = sum(part.num_bytes for part in parts), list[Sample]()
    for kind in sorted(kinds):
        members = sorted(kinds[kind], key=lambda part: part.num_bytes)
        share = sum(part.num_bytes for part in members) / total
        count = min(len(members), max(_MIN_PARTS, math.ceil(_SAMPLED_PARTS * share)))
        cuts = [len(members) * index // count for index in range(count + 1)]
        samples += [Sample(members[start:stop]) for start, stop in pairwise(cuts)]
    return samples


def read_for(seconds: float, reader: UnitReader, sample: Sample, failures: list[ReadFailure]) -> Iterator[Record]:
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
    lines: list[str]  # the estimate as text


def makespan(seconds: Iterable[float], num_cpus: int) -> float:
    """Time of units that take `seconds` of a CPU each; a CPU that is free takes the longest unit that is left."""
    units = sorted(seconds, reverse=True)
    busy = [0.0] * min(num_cpus, max(1, len(units)))
    for unit in units:
        heapq.heapreplace(busy, busy[0] + unit)
    return max(busy)


def _read_sample(
    job: Preparation, folder: Path, tokenizer: TokenizerInfo | None, samples: Sequence[Sample]
) -> tuple[Counts, list[ReadFailure]]:
    """Processes the sampled parts like a task for about 20 seconds; adds their bytes and sums to them."""
    config, failures, total = job.config, list[ReadFailure](), sum(sample.stands_for for sample in samples)
    engine = output_engine(job, folder, job.units)
    decide = partial(decide_records, folder=folder, config=config, tokenizer=tokenizer, engine=engine)
    list(decide(iter(())))  # load the tokenizer before the clock starts
    running = Counts()
    for sample in samples:
        started, seconds = time.process_time(), _SAMPLE_SECONDS * sample.stands_for / total
        reader = UnitReader(Unit(name="00000", parts=[sample.part]), config.corpus, config.content)
        for decision, content in decide(read_for(seconds, reader, sample, failures)):
            entry, kept = decision.entry, content is not None
            running.add(entry, kept)
            num_texts = 0 if decision.layout is None else len(decision.layout.starts)
            media_bytes = content.num_bytes if isinstance(content, Image | Clip) else 0
            num_tokens = (entry.num_tokens or 0) if kept else 0
            sample.sums += [1, kept, num_tokens, entry.text_bytes, 0, num_texts, media_bytes]
        sample.sums[SUMS.index("cpu_seconds")] = time.process_time() - started
    return sum_counts([running]), failures


def estimate(job: Preparation, folder: Path, tokenizer: TokenizerInfo | None, cpus: int | None = None) -> Estimate:
    """Processes parts of the corpus like a task for about 20 seconds and scales up the results by input bytes.

    The time is that on `cpus` CPUs, at least 1; None: on those of the session, else on all of this machine.
    """
    config, units, kind = job.config, job.units, job.config.content.kind
    samples = draw_samples([part for unit in units for part in unit.parts])
    counts, failures = _read_sample(job, folder, tokenizer, samples)
    if problem := nothing_kept(counts, config, failures):
        get_logger().warning("in the sample: %s", problem)
    means = [sample.sums / max(1, sample.num_bytes) for sample in samples]  # for a byte of input
    totals = [mean * sample.stands_for for mean, sample in zip(means, samples, strict=True)]
    sums = dict(zip(SUMS, np.sum([np.zeros(len(SUMS)), *totals], axis=0).tolist(), strict=True))
    rates = {
        (part.source, part.start): float(mean[SUMS.index("cpu_seconds")])
        for mean, sample in zip(means, samples, strict=True)
        for part in sample.parts
    }
    of_units = [sum(rates.get((part.source, part.start), 0) * part.num_bytes for part in unit.parts) for unit in units]
    num_cpus = cpus or config.session.num_cpus or os.cpu_count() or 1
    token_bytes = (2 if tokenizer.vocab_size <= UINT16_VOCABULARY else 4) if tokenizer else 0
    window_bytes = 4 / config.geometry.max_tokens if kind == "documents" else 0
    shard_bytes = sums["num_tokens"] * (token_bytes + window_bytes) + sums["kept"] * _ROW_BYTES
    shard_bytes += sums["num_texts"] * _TEXT_BYTES + sums["media_bytes"]
    num_bytes, total = (sum(getattr(sample, name) for sample in samples) for name in ("num_bytes", "stands_for"))
    documents, kept, num_tokens = (round(sums[name]) for name in ("documents", "kept", "num_tokens"))
    about = "about " if num_bytes < total else ""
    reasons = in_words(dict(Counter({**counts.dropped, **counts.failed}).most_common()))
    too_many = sum(counts.failed.values()) > config.max_error_rate * counts.read
    excess = f"; more failed than max_error_rate = {config.max_error_rate:g} allows" if too_many else ""
    sources = (part.source for unit in units for part in unit.parts)
    hint = lines_hint(counts.read, counts.dropped, job.plan.config, sources)
    lines = [
        f"estimated from {num_bytes / MIB:,.1f} of {total / MIB:,.1f} MiB of input:",
        f"  {noun_of(kind):11} {about}{documents:,}, of which {about}{kept:,} kept ({kept / max(1, documents):.0%})",
        *([f"  not kept    {reasons} (in the sample){excess}"] if reasons else []),
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
    useful = max(1, math.ceil(sum(seconds) / max(seconds[longest], 1e-9)))  # 1e-9, or it could be divided by zero
    second = ", the search for duplicates, the second writing of the shards" if job.config.duplicates.enabled else ""
    return [
        f"  measured    on 1 of {os.cpu_count()} CPUs of this machine; estimated for {num_cpus} CPUs of the same speed",
        f"  units       {len(seconds):,}, the longest {duration(math.ceil(seconds[longest]))} of a CPU "
        f"(begins with {job.units[longest].parts[0].source!r}): CPUs beyond about {useful:,} do not shorten the time",
        f"  not counted waits for disks and network{second}",
    ]
