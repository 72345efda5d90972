"""Sums over a prepared corpus, read once in batches: ledgers, of short texts also shards; memory grows with sources."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.errors import ShardError
from declutr.pipeline.shards.content import LABELS, MEDIA_KINDS
from declutr.pipeline.shards.ledger import ledger_batches
from declutr.pipeline.shards.manifest import SPLITS, Manifest
from declutr.pipeline.shards.shards import ShardSet, ragged

EXAMPLES_A_REASON = 3
_MATCH = re.compile(r"(?P<name>.+): (?P<words>.*) \((?P<number>\d+) in all\)", re.DOTALL)
"""Form in which pipeline/filters/document_filter.py writes it."""
_ROWS = 10_000
CONTAMINATED = "contaminated"  # reason to drop documents that share text with an evaluation set
_MATCHED = pa.array([*SPLITS, CONTAMINATED])

I64 = NDArray[np.int64]


MAX_NAMES = 100_000
"""Largest number of names. When there are more, the half with the most text stays and the others join the rest. Sources
are read one after the other, so a source is rarely dropped before it is complete."""


class Tally(NamedTuple):
    """Counts of documents of one kind, read and kept."""

    read: int = 0
    text_bytes: int = 0
    kept: int = 0
    kept_tokens: int = 0


def total(tallies: Iterable[Tally]) -> Tally:
    """Sum of tallies."""
    return Tally(*map(sum, zip(*tallies, strict=True)))


def tally_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Columns to sum over rows of a ledger, named as `Tally`'s fields."""
    kept = pc.is_in(batch.column("status"), pa.array(SPLITS)).cast(pa.int64())
    tokens = pc.multiply(pc.fill_null(batch.column("num_tokens"), 0), kept)
    read = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    return dict(zip(Tally._fields, (read, batch.column("text_bytes"), kept, tokens), strict=True))


@dataclass
class Tallies:
    """Tallies by name."""

    # Every name with its tally, without the dropped names; "" for a missing name.
    by_name: dict[str, Tally] = field(default_factory=dict)
    num_left: int = 0  # number of dropped names; their documents are in `rest`
    rest: Tally = field(default_factory=Tally)

    def add(self, names: pa.Array, columns: dict[str, pa.Array]) -> None:
        """Adds rows: their names and their `tally_columns`."""
        sums = pa.table({"name": names} | columns).group_by("name").aggregate([(name, "sum") for name in columns])
        rows = zip(*(sums.column(f"{name}_sum").to_pylist() for name in Tally._fields), strict=True)
        for name, row in zip(sums.column("name").to_pylist(), rows, strict=True):
            self.by_name[name or ""] = total([self.by_name.get(name or "", Tally()), Tally(*row)])
        if len(self.by_name) > MAX_NAMES:
            ranked = sorted(self.by_name.items(), key=lambda item: (-item[1].text_bytes, item[0]))
            self.by_name, left = dict(ranked[: MAX_NAMES // 2]), ranked[MAX_NAMES // 2 :]
            self.num_left += len(left)
            self.rest = total([self.rest, *(tally for _, tally in left)])

    def largest(self, groups: dict[str, Tally], limit: int) -> list[tuple[str, Tally]]:
        """The groups of names with the most kept tokens, and all others as one row."""
        ranked = sorted(groups.items(), key=lambda item: (-item[1].kept_tokens, -item[1].text_bytes, item[0]))
        num_left = self.num_left + len(ranked[limit:])
        rest = total([self.rest, *(tally for _, tally in ranked[limit:])])
        return ranked[:limit] + ([(f"({num_left:,} others)", rest)] if num_left else [])


class Lengths(Counter[int]):
    """Numbers of documents or texts by length in tokens, pixels or frames."""

    def add(self, lengths: NDArray[np.integer]) -> None:
        """Counts these lengths."""
        values, counts = np.unique(lengths, return_counts=True)
        self.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(length * number for length, number in self.items()) / max(1, self.total())

    def quantile(self, part: float) -> int:
        """Smallest length that at least this share of the texts does not exceed."""
        # NumPy takes weights with this method alone
        return int(np.quantile([*self], part, weights=[*self.values()], method="inverted_cdf"))


@dataclass
class Matches:
    """Documents that hold text of one evaluation set."""

    name: str
    words: str  # words of the match in the first document
    kept: int = 0
    dropped: int = 0
    max_ngrams: int = 0  # largest number of different n-grams in one document


@dataclass
class Survey:
    """Sums over the ledgers of a folder. Made by `survey`."""

    seed: int
    statuses: Tallies = field(default_factory=Tallies)
    # Tallies by top level: a file, or the archive that contains the document.
    sources: Tallies = field(default_factory=Tallies)
    languages: Tallies = field(default_factory=Tallies)
    # Lengths of the documents that were tokenized or decoded, by status.
    lengths: dict[str, Lengths] = field(default_factory=lambda: defaultdict(Lengths))
    # Matches by evaluation set; notes of another form count under the empty name.
    matches: dict[str, Matches] = field(default_factory=dict)
    # Rejected documents drawn as examples, by reason: key, unit and ordinal; the smallest keys win.
    drawn: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch, unit: int, start: int) -> None:
        """Adds rows of a unit's ledger, from ordinal `start` on."""
        columns = tally_columns(batch)
        top = pc.replace_substring_regex(batch.column("source"), pattern="(?s)!.*", replacement="")  # ARCHIVE!MEMBER
        self.sources.add(top, columns)
        self.statuses.add(batch.column("status"), columns)
        self.languages.add(batch.column("language"), columns)
        self._match(batch)
        statuses = batch.column("status").dictionary_encode()
        codes = statuses.indices.to_numpy()
        measured = batch.column("num_tokens").is_valid().to_numpy(zero_copy_only=False)
        sizes = pc.fill_null(batch.column("num_tokens"), 0).to_numpy()
        for code, name in enumerate(statuses.dictionary.to_pylist()):
            self.lengths[name].add(sizes[measured & (codes == code)])
            if name not in SPLITS:
                self._draw(name, unit, start + np.flatnonzero(codes == code))

    def _match(self, batch: pa.RecordBatch) -> None:
        """Counts kept and contaminated documents that hold text of evaluation sets."""
        with_note = pc.and_(pc.is_in(batch.column("status"), _MATCHED), batch.column("detail").is_valid())
        noted = batch.select(["status", "detail"]).filter(with_note).to_pylist()
        for row in noted:
            match = _MATCH.fullmatch(row["detail"])
            name, words = (match["name"], match["words"]) if match else ("", row["detail"])
            matches = self.matches.setdefault(name, Matches(name, words))
            matches.kept += row["status"] != CONTAMINATED
            matches.dropped += row["status"] == CONTAMINATED
            matches.max_ngrams = max(matches.max_ngrams, int(match["number"]) if match else 0)

    def _draw(self, reason: str, unit: int, ordinals: I64) -> None:
        """Draws examples of a reason: those with the smallest keys, each a function of seed, unit and ordinal."""
        units = np.full(len(ordinals), unit, np.uint64)
        keys = seeding.words(self.seed, "report", units, ordinals.astype(np.uint64), 1)[:, 0]
        best = np.argsort(keys, kind="stable")[:EXAMPLES_A_REASON]  # so that memory does not grow with the rejected
        drawn = [(int(keys[place]), unit, int(ordinals[place])) for place in best]
        self.drawn[reason] = sorted(self.drawn.get(reason, []) + drawn)[:EXAMPLES_A_REASON]


def survey(folder: Path, manifest: Manifest) -> Survey:
    """Reads all ledgers of a folder."""
    sums = Survey(int(manifest.config.get("seed", 0)))
    for ledger in manifest.ledgers:
        path, start = folder / ledger.name, 0
        for batch in ledger_batches(path):
            sums.add(batch, int(path.stem), start)
            start += batch.num_rows
    counted = {status: tally.read for status, tally in sums.statuses.by_name.items()}
    totals = {"train": manifest.totals["kept_train"], "held-out": manifest.totals["kept_held_out"]}
    expected = totals | manifest.dropped | manifest.failed
    if counted != {status: number for status, number in expected.items() if number}:
        raise ShardError(f"{folder}: the ledgers count {counted}, the manifest says {expected}; prepare it again")
    return sums


@dataclass
class TextSurvey:
    """Figures of all rows of short texts of a folder. Made by `survey_texts`."""

    # By role: sentence, premise, or the label of a hypothesis.
    lengths: dict[str, Lengths] = field(default_factory=lambda: defaultdict(Lengths))
    hypotheses: Lengths = field(default_factory=Lengths)  # rows by number of hypotheses


def survey_texts(folder: Path, manifest: Manifest) -> TextSurvey | None:
    """Reads the rows of all shards; None if they hold documents, images or audio."""
    kind = manifest.content.kind
    if kind == "documents" or kind in MEDIA_KINDS:
        return None
    survey, first_role = TextSurvey(), "sentence" if kind == "sentences" else "premise"
    for shards in (ShardSet(folder, split) for split in SPLITS):
        for first in range(0, shards.num_documents, _ROWS):
            rows = shards.take(np.arange(first, min(first + _ROWS, shards.num_documents)))
            (starts, offsets), (labels, _) = ragged(rows.column("starts")), ragged(rows.column("labels"))
            ends = np.append(starts[1:], 0)  # wrong for the last text of each row, until the next line
            ends[offsets[1:] - 1] = rows.column("num_tokens").to_numpy()
            for label in np.unique(labels).tolist():
                role = first_role if label < 0 else LABELS[label]
                survey.lengths[role].add((ends - starts)[labels == label])
            survey.hypotheses.add(np.diff(offsets) - 1)
    return survey
