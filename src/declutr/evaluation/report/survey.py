"""Sums over the ledgers of a prepared corpus, read once in batches: counts, lengths, sources, languages.

Memory grows with the number of duplicates (16 bytes each) and, up to a limit, of sources.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.evaluation.report.tally import Tallies, tally_columns
from declutr.pipeline.shards.ledger import ledger_batches
from declutr.pipeline.shards.manifest import SPLITS, Manifest, ShardError
from declutr.pipeline.shards.windows import shortest_document

BINS_PER_OCTAVE = 4
_OCTAVES = 32
NUM_BINS = 2 * _OCTAVES * BINS_PER_OCTAVE
"""Bins of a length histogram, half of them below the shortest document that is kept."""
EXAMPLES_A_REASON = 3
_KEPT_COPY = r"^(?P<unit>\d+):(?P<ordinal>\d+) is kept"
_MATCH = r"(?s)^(?P<name>.+): (?P<words>.*) \((?P<number>\d+) in all\)$"
"""Form in which pipeline/filters/document_filter.py writes it."""
_PLACE_SHIFT = 40
CONTAMINATED = "contaminated"
"""Fate of documents that share text with an evaluation set."""

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Drawn:
    """A rejected document drawn as an example; the smallest keys win."""

    key: int
    unit: int
    ordinal: int
    line: int
    """Line number in the unit's file of rejected documents."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Documents that hold text of one evaluation set."""

    name: str
    kept: int
    dropped: int
    most: int
    """Largest number of different n-grams in one document."""
    words: str
    """Words of the match in the first document."""


@dataclass
class Survey:
    """Sums over the ledgers of a folder. Made by `survey`."""

    shortest: int
    """Tokens of the shortest document that is kept; bins of lengths are counted from it."""
    limits: list[int]
    """Lengths in tokens that divide the bands, ascending."""
    seed: int
    statuses: Tallies = field(default_factory=Tallies)
    sources: Tallies = field(default_factory=Tallies)
    """Tallies by top level: a file, or the archive that contains the document."""
    languages: Tallies = field(default_factory=Tallies)
    lengths: dict[str, I64] = field(default_factory=dict)
    """Documents by length for each status, `(NUM_BINS,)`; bounds in `bin_edges`."""
    bands: dict[str, I64] = field(default_factory=dict)
    """Documents and tokens, `(num_limits + 1, 2)`, below each limit and from the last one on, for each status."""
    matches: dict[str, Matches] = field(default_factory=dict)
    """Matches by evaluation set; notes of another form count under the empty name."""
    drawn: dict[str, list[Drawn]] = field(default_factory=dict)
    _copies: list[I64] = field(default_factory=list)
    _kept_places: list[I64] = field(default_factory=list)

    @property
    def copies(self) -> tuple[I64, I64]:
        """`(n,)` places of removed duplicates, and of the documents kept instead of them; see `unit_and_ordinal`."""
        empty = [np.empty(0, np.int64)]
        return np.concatenate(self._copies or empty), np.concatenate(self._kept_places or empty)

    def bin_edges(self) -> NDArray[np.float64]:
        """Bounds of the length bins in tokens, `(NUM_BINS + 1,)`: quarters of octaves from the shortest document."""
        steps = np.arange(NUM_BINS + 1) - NUM_BINS // 2
        return self.shortest * np.exp2(steps / BINS_PER_OCTAVE)

    def add(self, batch: pa.RecordBatch, unit: int, start: int, line: int) -> int:
        """Adds rows of a unit's ledger, from ordinal `start` on.

        `line` is the number of the unit's rejected documents before this batch; returns their number after it.
        """
        statuses = batch.column("status").dictionary_encode()
        names: list[str] = statuses.dictionary.to_pylist()
        codes = statuses.indices.to_numpy()
        self._count(batch)
        self._measure(batch.column("num_tokens"), codes, names)
        self._match(batch)
        rejected = ~np.isin(codes, [code for code, name in enumerate(names) if name in SPLITS])
        lines = line + np.cumsum(rejected) - 1
        for code, name in enumerate(names):
            if name not in SPLITS:
                rows = np.flatnonzero(codes == code)
                self._draw(name, unit, start + rows, lines[rows])
                self._link(batch.column("detail").take(pa.array(rows)), unit, start + rows)
        return line + int(rejected.sum())

    def _count(self, batch: pa.RecordBatch) -> None:
        columns = tally_columns(batch)
        top = pc.replace_substring_regex(batch.column("source"), pattern="(?s)!.*", replacement="")
        self.sources.add(top, columns)
        self.statuses.add(batch.column("status"), columns)
        self.languages.add(batch.column("language"), columns)

    def _measure(self, column: pa.Array, codes: I64, names: list[str]) -> None:
        """Adds the lengths of the documents that were tokenized."""
        known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        lengths = column.take(pa.array(known)).to_numpy()
        octaves = np.log2(np.maximum(lengths, 1) / self.shortest)
        bins = np.clip(np.floor(octaves * BINS_PER_OCTAVE).astype(np.int64) + NUM_BINS // 2, 0, NUM_BINS - 1)
        bands = np.digitize(lengths, self.limits)
        for code in np.unique(codes[known]):
            mine = codes[known] == code
            found = np.bincount(bins[mine], minlength=NUM_BINS)
            documents = np.bincount(bands[mine], minlength=len(self.limits) + 1)
            tokens = np.bincount(bands[mine], weights=lengths[mine], minlength=len(self.limits) + 1).astype(np.int64)
            name = names[code]
            self.lengths[name] = self.lengths.get(name, np.zeros(NUM_BINS, np.int64)) + found
            self.bands[name] = self.bands.get(name, 0) + np.stack([documents, tokens], 1)

    def _match(self, batch: pa.RecordBatch) -> None:
        """Counts kept and contaminated documents that hold text of evaluation sets."""
        statuses = batch.column("status")
        noted = pc.and_(pc.is_in(statuses, pa.array([*SPLITS, CONTAMINATED])), batch.column("detail").is_valid())
        details = batch.column("detail").filter(noted)
        if not len(details):
            return
        found = pc.extract_regex(details, _MATCH)
        kept = pc.not_equal(statuses.filter(noted), CONTAMINATED)
        columns = {
            "name": pc.fill_null(pc.struct_field(found, "name"), ""),
            "number": pc.fill_null(pc.struct_field(found, "number").cast(pa.int64()), 0),
            "words": pc.coalesce(pc.struct_field(found, "words"), details),
            "kept": kept.cast(pa.int64()),
            "dropped": pc.invert(kept).cast(pa.int64()),
        }
        sums = [("kept", "sum"), ("dropped", "sum"), ("number", "max"), ("words", "first")]
        grouped = pa.table(columns).group_by("name", use_threads=False).aggregate(sums)
        names = ("name", "kept_sum", "dropped_sum", "number_max", "words_first")
        for row in zip(*(grouped.column(name).to_pylist() for name in names), strict=True):
            fresh = Matches(*row)
            old = self.matches.get(fresh.name, Matches(fresh.name, 0, 0, 0, fresh.words))
            self.matches[fresh.name] = Matches(
                fresh.name, old.kept + fresh.kept, old.dropped + fresh.dropped, max(old.most, fresh.most), old.words
            )

    def _draw(self, reason: str, unit: int, ordinals: I64, lines: I64) -> None:
        """Draws examples of a reason: those with the smallest keys, each a function of seed, unit and ordinal."""
        words = seeding.words(
            self.seed, "report", np.full(len(ordinals), unit, np.uint64), ordinals.astype(np.uint64), 1
        )
        best = np.argsort(words[:, 0], kind="stable")[:EXAMPLES_A_REASON]
        fresh = [Drawn(int(words[i, 0]), unit, int(ordinals[i]), int(lines[i])) for i in best]
        self.drawn[reason] = sorted(self.drawn.get(reason, []) + fresh)[:EXAMPLES_A_REASON]

    def _link(self, details: pa.Array, unit: int, ordinals: I64) -> None:
        """Records which document is kept instead of a removed duplicate."""
        found = pc.extract_regex(details, _KEPT_COPY)
        valid = np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False))
        if len(valid):
            kept = found.take(pa.array(valid))
            units, places = (kept.field(name).cast(pa.int64()).to_numpy() for name in ("unit", "ordinal"))
            self._copies.append((unit << _PLACE_SHIFT) + ordinals[valid])
            self._kept_places.append((units << _PLACE_SHIFT) + places)


def unit_and_ordinal(place: int) -> tuple[int, int]:
    """Unit and ordinal of a place in `Survey.copies`."""
    return place >> _PLACE_SHIFT, place & ((1 << _PLACE_SHIFT) - 1)


def survey(folder: Path, manifest: Manifest) -> Survey:
    """Reads all ledgers of a folder.

    Raises:
        ShardError: the ledgers do not say what the manifest says.
    """
    geometry = manifest.geometry
    shortest = shortest_document(geometry, manifest.short_documents)
    limits = sorted({shortest, geometry.max_tokens, geometry.min_document_tokens})
    found = Survey(shortest, limits, int(manifest.config.get("seed", 0)))
    for ledger in manifest.ledgers:
        path = folder / ledger.name
        start = line = 0
        for batch in ledger_batches(path):
            line = found.add(batch, int(path.stem), start, line)
            start += batch.num_rows
    counted = {status: tally.read for status, tally in found.statuses.all().items()}
    totals = {"train": manifest.totals["kept_train"], "held-out": manifest.totals["kept_held_out"]}
    told = totals | manifest.dropped | manifest.failed
    if counted != {status: number for status, number in told.items() if number}:
        raise ShardError(f"{folder}: the ledgers count {counted}, the manifest says {told}; prepare it again")
    return found
