"""Documents, bytes and tokens summed by a name that may have millions of values, such as a source."""

from dataclasses import astuple, dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.shards.manifest import SPLITS

MAX_NAMES = 100_000
"""Largest number of names between batches. When there are more, the half with the most text stays and the others join
the rest. Sources are read one after the other, so a source is rarely dropped before it is complete."""
_PENDING_ROWS = 500_000


@dataclass(slots=True)
class Tally:
    """Counts of documents of one kind, read and kept."""

    read: int = 0
    text_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    kept_tokens: int = 0

    def add(self, other: "Tally") -> None:
        """Adds the documents of another tally."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMS = tuple(one.name for one in fields(Tally))


def tally_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Columns to sum over rows of a ledger, named as `Tally`'s fields."""
    kept = pc.is_in(batch.column("fate"), pa.array(SPLITS)).cast(pa.int64())
    size = batch.column("text_bytes")
    tokens = pc.fill_null(batch.column("num_tokens"), 0)
    read = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    return dict(zip(_SUMS, (read, size, kept, pc.multiply(size, kept), pc.multiply(tokens, kept)), strict=True))


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
            self._give_up(table.slice(MAX_NAMES // 2))
            table = table.slice(0, MAX_NAMES // 2).combine_chunks()
        self._pending = [table]

    def _give_up(self, table: pa.Table) -> None:
        self.num_left += len(table)
        self.rest.add(Tally(*(pc.sum(table.column(name)).as_py() or 0 for name in _SUMS)))

    def all(self) -> dict[str | None, Tally]:
        """Every name with its tally, without the dropped names."""
        if not self._pending:
            return {}
        self._settle()
        return _read(self._pending[0])

    def largest(self, limit: int) -> tuple[list[tuple[str, Tally]], int, Tally]:
        """The names with the most kept tokens, the number of all others, and what those add up to."""
        if not self._pending:
            return [], 0, Tally()
        self._settle()
        order = [("kept_tokens", "descending"), ("text_bytes", "descending"), ("name", "ascending")]
        table = self._pending[0].sort_by(order)
        others = Tallies(self.num_left, Tally(*astuple(self.rest)))
        others._give_up(table.slice(limit))
        return (
            [(name or "", tally) for name, tally in _read(table.slice(0, limit)).items()],
            others.num_left,
            others.rest,
        )


def _grouped(table: pa.Table) -> pa.Table:
    """One row a name."""
    sums = table.group_by("name").aggregate([(name, "sum") for name in _SUMS])
    return sums.select(["name", *(f"{name}_sum" for name in _SUMS)]).rename_columns(["name", *_SUMS])


def _read(table: pa.Table) -> dict[str | None, Tally]:
    names, *sums = (table.column(name).to_pylist() for name in ("name", *_SUMS))
    return {name: Tally(*row) for name, row in zip(names, zip(*sums, strict=True), strict=True)}
