"""Sums over a prepared corpus, read once in batches: its ledgers, and of short texts also its shards.

Memory grows with the number of duplicates (16 bytes each) and, up to a limit, of sources.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.errors import ShardError
from declutr.pipeline.readers.names import bare_suffix
from declutr.pipeline.shards.content import LABELS, MEDIA_KINDS
from declutr.pipeline.shards.ledger import ledger_batches
from declutr.pipeline.shards.manifest import SPLITS, Manifest
from declutr.pipeline.shards.shards import ShardSet
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
_ROWS = 10_000
CONTAMINATED = "contaminated"
"""Reason to drop documents that share text with an evaluation set."""

I64 = NDArray[np.int64]


MAX_NAMES = 100_000
"""Largest number of names between batches. When there are more, the half with the most text stays and the others join
the rest. Sources are read one after the other, so a source is rarely dropped before it is complete."""
_PENDING_ROWS = 500_000


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of documents of one kind, read and kept."""

    read: int = 0
    text_bytes: int = 0
    kept: int = 0
    kept_tokens: int = 0


_SUMS = tuple(column.name for column in fields(Tally))


def total(tallies: Iterable[Tally]) -> Tally:
    """Sum of tallies."""
    return Tally(*map(sum, zip(*map(astuple, tallies), strict=True)))


def tally_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Columns to sum over rows of a ledger, named as `Tally`'s fields."""
    kept = pc.is_in(batch.column("status"), pa.array(SPLITS)).cast(pa.int64())
    size = batch.column("text_bytes")
    tokens = pc.fill_null(batch.column("num_tokens"), 0)
    read = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    return dict(zip(_SUMS, (read, size, kept, pc.multiply(tokens, kept)), strict=True))


@dataclass
class Tallies:
    """Tallies by name."""

    num_left: int = 0
    """Number of dropped names; their documents are in `rest`."""
    rest: Tally = field(default_factory=Tally)
    _pending: list[pa.Table] = field(default_factory=list)

    def add(self, names: pa.Array, columns: dict[str, pa.Array]) -> None:
        """Adds rows: their names and their `tally_columns`."""
        self._pending.append(_grouped(pa.table({"name": names} | columns)))
        if sum(len(table) for table in self._pending) > _PENDING_ROWS:
            self._settle()

    def _settle(self) -> None:
        table = _grouped(pa.concat_tables(self._pending))
        if len(table) > MAX_NAMES:
            table = table.sort_by([("text_bytes", "descending"), ("name", "ascending")])
            left = table.slice(MAX_NAMES // 2)
            self.num_left += len(left)
            self.rest = total([self.rest, Tally(*(pc.sum(left.column(name)).as_py() for name in _SUMS))])
            table = table.slice(0, MAX_NAMES // 2).combine_chunks()
        self._pending = [table]

    def all(self) -> dict[str, Tally]:
        """Every name with its tally, without the dropped names; "" for a missing name."""
        if not self._pending:
            return {}
        self._settle()
        names, *sums = (self._pending[0].column(name).to_pylist() for name in ("name", *_SUMS))
        return {name or "": Tally(*row) for name, row in zip(names, zip(*sums, strict=True), strict=True)}

    def largest(self, groups: dict[str, Tally], limit: int) -> list[tuple[str, Tally]]:
        """The groups of names with the most kept tokens, and all others as one row."""
        ranked = sorted(groups.items(), key=lambda item: (-item[1].kept_tokens, -item[1].text_bytes, item[0]))
        num_left = self.num_left + len(ranked[limit:])
        rest = total([self.rest, *(tally for _, tally in ranked[limit:])])
        return ranked[:limit] + ([(f"({num_left:,} others)", rest)] if num_left else [])


def _grouped(table: pa.Table) -> pa.Table:
    """One row a name."""
    sums = table.group_by("name").aggregate([(name, "sum") for name in _SUMS])
    return sums.select(["name", *(f"{name}_sum" for name in _SUMS)]).rename_columns(["name", *_SUMS])


_STEP = re.compile(r"[/!]")
"""Separators of folders, and of an archive and its member."""


def group_sources(sources: dict[str, Tally], limit: int) -> dict[str, Tally]:
    """The sources themselves if there are at most `limit`, otherwise sums over common folders.

    The sums are named `folder/ (n files)`, `*.txt (n files)` or as a single file. There are more than `limit` only
    where there are more top folders.
    """
    if len(sources) <= limit:
        return sources
    depths = range(max(map(_num_steps, sources)), 0, -1)
    steps = next((steps for steps in depths if len({_cut(name, steps) for name in sources}) <= limit), 0)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sources:
        beginning = _cut(name, steps or 1)
        if beginning != name:
            beginning += "/"
        elif not steps:
            beginning = f"*{bare_suffix(name)}"
        groups[beginning].append(name)
    sums: dict[str, Tally] = {}
    for beginning, names in groups.items():
        alone = len(names) == 1 and not beginning.endswith("/")
        label = names[0] if alone else f"{beginning} ({len(names):,} file{'s' * (len(names) > 1)})"
        sums[label] = total(sources[name] for name in names)
    return sums


def _num_steps(source: str) -> int:
    """Steps of a source: its folders and its last name."""
    return len(_STEP.findall(source)) + 1


def _cut(source: str, steps: int) -> str:
    """The source up to its step of this number."""
    places = [match.start() for match in _STEP.finditer(source)]
    return source[: places[steps - 1]] if len(places) >= steps else source


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
        measured = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        lengths = column.take(pa.array(measured)).to_numpy()
        octaves = np.log2(np.maximum(lengths, 1) / self.shortest)
        bins = np.clip(np.floor(octaves * BINS_PER_OCTAVE).astype(np.int64) + NUM_BINS // 2, 0, NUM_BINS - 1)
        bands = np.digitize(lengths, self.limits)
        for code in np.unique(codes[measured]):
            rows, num_bands = codes[measured] == code, len(self.limits) + 1
            documents = np.bincount(bands[rows], minlength=num_bands)
            tokens = np.bincount(bands[rows], weights=lengths[rows], minlength=num_bands).astype(np.int64)
            name = names[code]
            counts = np.bincount(bins[rows], minlength=NUM_BINS)
            self.lengths[name] = self.lengths.get(name, np.zeros(NUM_BINS, np.int64)) + counts
            self.bands[name] = self.bands.get(name, 0) + np.stack([documents, tokens], 1)

    def _match(self, batch: pa.RecordBatch) -> None:
        """Counts kept and contaminated documents that hold text of evaluation sets."""
        statuses = batch.column("status")
        noted = pc.and_(pc.is_in(statuses, pa.array([*SPLITS, CONTAMINATED])), batch.column("detail").is_valid())
        details = batch.column("detail").filter(noted)
        if not len(details):
            return
        parts = pc.extract_regex(details, _MATCH)
        kept = pc.not_equal(statuses.filter(noted), CONTAMINATED)
        columns = {
            "name": pc.fill_null(pc.struct_field(parts, "name"), ""),
            "number": pc.fill_null(pc.struct_field(parts, "number").cast(pa.int64()), 0),
            "words": pc.coalesce(pc.struct_field(parts, "words"), details),
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
        copies = pc.extract_regex(details, _KEPT_COPY)
        valid = np.flatnonzero(copies.is_valid().to_numpy(zero_copy_only=False))
        if len(valid):
            kept = copies.take(pa.array(valid))
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
    sums = Survey(shortest, limits, int(manifest.config.get("seed", 0)))
    for ledger in manifest.ledgers:
        path = folder / ledger.name
        start = line = 0
        for batch in ledger_batches(path):
            line = sums.add(batch, int(path.stem), start, line)
            start += batch.num_rows
    counted = {status: tally.read for status, tally in sums.statuses.all().items()}
    totals = {"train": manifest.totals["kept_train"], "held-out": manifest.totals["kept_held_out"]}
    expected = totals | manifest.dropped | manifest.failed
    if counted != {status: number for status, number in expected.items() if number}:
        raise ShardError(f"{folder}: the ledgers count {counted}, the manifest says {expected}; prepare it again")
    return sums


class TextLengths(Counter[int]):
    """Numbers of texts of one role by length in tokens."""

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(length * number for length, number in self.items()) / max(1, self.total())

    def quantile(self, part: float) -> int:
        """Smallest length that at least this share of the texts does not exceed."""
        lengths = sorted(self)
        sums = np.cumsum([self[length] for length in lengths])
        return lengths[int(np.searchsorted(sums, part * sums[-1]))]


@dataclass
class TextSurvey:
    """Figures of all rows of short texts of a folder. Made by `survey_texts`."""

    lengths: dict[str, TextLengths] = field(default_factory=dict)
    """By role: sentence, premise, or the label of a hypothesis."""
    hypotheses: Counter[int] = field(default_factory=Counter)
    """Rows by number of hypotheses."""

    def add(self, rows: pa.Table, first_role: str) -> None:
        """Adds rows of a shard; the first text of each has this role."""
        starts, offsets = _flat(rows, "starts")
        labels, _ = _flat(rows, "labels")
        ends = np.append(starts[1:], 0)
        ends[offsets[1:] - 1] = rows.column("num_tokens").to_numpy()
        sizes = ends - starts
        for label in np.unique(labels).tolist():
            role = first_role if label < 0 else LABELS[label]
            values, counts = np.unique(sizes[labels == label], return_counts=True)
            lengths = dict(zip(values.tolist(), counts.tolist(), strict=True))
            self.lengths.setdefault(role, TextLengths()).update(lengths)
        numbers, counts = np.unique(np.diff(offsets) - 1, return_counts=True)
        self.hypotheses.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def survey_texts(folder: Path, manifest: Manifest) -> TextSurvey | None:
    """Reads the rows of all shards; None if they hold documents, images or audio.

    Raises:
        ShardError: a shard differs from the manifest.
    """
    kind = manifest.content.kind
    if kind == "documents" or kind in MEDIA_KINDS:
        return None
    survey = TextSurvey()
    for split in SPLITS:
        shards = ShardSet(folder, split)
        for first in range(0, shards.num_documents, _ROWS):
            rows = np.arange(first, min(first + _ROWS, shards.num_documents))
            survey.add(shards.take(rows), "sentence" if kind == "sentences" else "premise")
    return survey


def _flat(rows: pa.Table, name: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and offsets of a list column of one chunk."""
    column = rows.column(name).chunk(0)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(), offsets - offsets[0]
