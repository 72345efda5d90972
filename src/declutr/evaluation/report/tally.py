"""Documents, bytes and tokens summed by a name, such as a source."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from declutr.pipeline.readers.names import bare_suffix
from declutr.pipeline.shards.manifest import SPLITS

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


_SUMS = tuple(one.name for one in fields(Tally))


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
    found: dict[str, Tally] = {}
    for beginning, names in groups.items():
        alone = len(names) == 1 and not beginning.endswith("/")
        found[names[0] if alone else f"{beginning} ({len(names):,} file{'s' * (len(names) > 1)})"] = total(
            sources[name] for name in names
        )
    return found


def _num_steps(source: str) -> int:
    """Steps of a source: its folders and its last name."""
    return len(_STEP.findall(source)) + 1


def _cut(source: str, steps: int) -> str:
    """The source up to its step of this number."""
    places = [found.start() for found in _STEP.finditer(source)]
    return source[: places[steps - 1]] if len(places) >= steps else source
