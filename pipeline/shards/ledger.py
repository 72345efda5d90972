"""The ledger of a unit, one row for every document that was read, and the counts of a ledger by status.

| column     | type                  | meaning                                                                       |
|------------|-----------------------|-------------------------------------------------------------------------------|
| id         | fixed_size_binary(16) | as in the shards; null where nothing could be read                            |
| source     | string                | as in the shards                                                              |
| offset     | int64                 | as in the shards                                                              |
| text_bytes | int64                 | UTF-8 bytes of the text after cleaning                                        |
| num_tokens | int64                 | null if not tokenized; pixels of an image, frames of a clip                   |
| language   | string                | null if it was not identified                                                 |
| status       | string                | `train`, `held-out`, or the reason why the document was dropped or failed     |
| row        | int64                 | row in the unit's shard of that split; null if the document is in no shard    |
| detail     | string                | message of a failure, deciding figure or matched text; null if there is none  |

Rows are in reading order; a document's row number is its ordinal in the unit.

Of pairs, the ledger has one row for each premise, with the offset of its first pair and the bytes and tokens of all its
texts, and one for each single pair that was left out. The premises of a file follow its other rows. Of documents split
into sentences, it has one row for each sentence, with the offset of the document.
"""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from declutr.common.config import Strict
from declutr.common.errors import ShardError
from declutr.common.storage import atomic_file, hash_file
from declutr.pipeline.readers.corpus import ID_BYTES


class Counts(Strict):
    """Counts of the documents that were read. They balance: read = kept + all dropped + all failed."""

    read: int
    kept: int
    dropped: dict[str, int]
    """Documents by drop reason."""
    failed: dict[str, int]
    """Documents by failure reason; a file that breaks off counts once."""
    text_bytes: int
    """UTF-8 bytes of the readable documents, whitespace-normalised."""
    longest_tokens: int
    """Tokens of the longest document, kept or not."""
    labels: dict[str, int] = Field(default_factory=dict)
    """Kept hypotheses, images or clips by label."""
    notes: dict[str, int] = Field(default_factory=dict)
    """Kept images or clips by what was changed, such as `first_frame` or `cut`."""

    def check(self, what: str) -> None:
        """Checks that the counts balance.

        Raises:
            ShardError: they do not.
        """
        explained = self.kept + sum(self.dropped.values()) + sum(self.failed.values())
        if self.read != explained:  # a document lost without a reason would be lost for good
            raise ShardError(f"{what}: {self.read} documents read, but {explained} kept, dropped or failed")


def sum_counts(counts: list[Counts]) -> Counts:
    """Sums counts over units."""

    def sum_of(name: str) -> dict[str, int]:
        # Equal bytes in any order of units.
        return dict(sorted(sum((Counter(getattr(count, name)) for count in counts), Counter[str]()).items()))

    return Counts(
        read=sum(count.read for count in counts),
        kept=sum(count.kept for count in counts),
        text_bytes=sum(count.text_bytes for count in counts),
        longest_tokens=max((count.longest_tokens for count in counts), default=0),
        **{name: sum_of(name) for name in ("dropped", "failed", "labels", "notes")},
    )


LEDGERS = "ledger"
"""Folder of the ledgers in the output folder."""
REJECTED = "rejected"
"""Folder of the documents that were not kept in the output folder."""
# Plain strings: an Arrow file cannot replace its dictionaries between batches, and zstd removes the repetition as well.
SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary(ID_BYTES)),
        pa.field("source", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("text_bytes", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64()),
        pa.field("language", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("row", pa.int64()),
        pa.field("detail", pa.string()),
    ]
)
_BATCH_ROWS = 10_000
_SHORTEST_PREFIX = 8
_OFFSET_DIGITS = 18  # of an int64


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a ledger, in the order of its columns."""

    id: bytes | None
    source: str
    offset: int
    text_bytes: int
    num_tokens: int | None
    language: str | None
    status: str
    row: int | None
    detail: str | None


class LedgerFile(Strict):
    """Description of a ledger in its sidecar."""

    name: str
    num_rows: int
    num_bytes: int
    sha256: str


class LedgerWriter(ExitStack):
    """Writes the ledger of one unit; the file appears if the block ends without an error."""

    def __init__(self, folder: Path, unit: str) -> None:
        super().__init__()
        self.name = f"{LEDGERS}/{unit}.arrow"
        self.num_rows = 0
        self._path = folder / self.name
        self._entries: list[Entry] = []

    def __enter__(self) -> Self:
        aside = self.enter_context(atomic_file(self._path))
        options = pa.ipc.IpcWriteOptions(compression="zstd")  # sources repeat in every row
        self._stream = self.enter_context(pa.ipc.new_file(str(aside), SCHEMA, options=options))
        self.push(self._end)  # after the stream was entered, so the last rows are written before it closes
        return self

    def add(self, entry: Entry) -> None:
        """Adds the next document that was read."""
        self._entries.append(entry)
        self.num_rows += 1
        if len(self._entries) >= _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*map(astuple, self._entries), strict=True)
        arrays = [pa.array(values, column.type) for values, column in zip(columns, SCHEMA, strict=True)]
        self._stream.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._entries = []

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._entries:
            self._flush()

    def result(self) -> LedgerFile:
        """The finished ledger."""
        size = self._path.stat().st_size
        return LedgerFile(name=self.name, num_rows=self.num_rows, num_bytes=size, sha256=hash_file(self._path))


@contextmanager
def rejected_writer(folder: Path, unit: str, enabled: bool) -> Iterator[Callable[[Entry, str], None]]:
    """Yields a function that writes a document that is not kept, as its ledger row and its text, for inspection.

    The JSON lines go to `rejected/<unit>.jsonl.gz`; if disabled, the function does nothing.
    """
    if not enabled:
        yield lambda _entry, _text: None
        return
    # No name and no time in the header, so that equal documents give equal bytes.
    with (
        atomic_file(folder / REJECTED / f"{unit}.jsonl.gz") as aside,
        aside.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream,
    ):

        def add(entry: Entry, text: str) -> None:
            facts = {"id": entry.id.hex() if entry.id else None, "source": entry.source, "offset": entry.offset}
            facts |= {"reason": entry.status, "detail": entry.detail, "text": text}
            stream.write(json.dumps(facts, ensure_ascii=False).encode() + b"\n")

        yield add


def ledger_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of one ledger, each with a bounded number of rows."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def ledger_entries(path: Path) -> Iterator[Entry]:
    """Rows of one ledger in reading order."""
    for batch in ledger_batches(path):
        yield from (Entry(**row) for row in batch.to_pylist())


def find_entries(folder: Path, document: str) -> Iterator[tuple[str, int, Entry]]:
    """Every row of an output folder that matches a name, with its unit and its ordinal.

    Args:
        folder: output folder of `prepare`.
        document: a document id in hexadecimal (or its first digits, an even number of at least 8), a source, or
            `SOURCE:OFFSET`.
    """
    source, _, offset = document.rpartition(":")
    prefix = _hex_prefix(document)
    for path in sorted((folder / LEDGERS).glob("*.arrow")):
        ordinal = 0
        for batch in ledger_batches(path):
            mask = pc.equal(batch.column("source"), document)
            if source and offset.isdecimal() and len(offset) <= _OFFSET_DIGITS:
                here = pc.and_(pc.equal(batch.column("source"), source), pc.equal(batch.column("offset"), int(offset)))
                mask = pc.or_(mask, here)
            if prefix is not None:
                by_id = pc.starts_with(batch.column("id").cast(pa.binary()), pattern=prefix)
                mask = pc.or_(mask, pc.fill_null(by_id, fill_value=False))
            for index in np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist():
                yield path.stem, ordinal + index, Entry(**batch.slice(index, 1).to_pylist()[0])
            ordinal += batch.num_rows


def entries_at(folder: Path, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Entry]:
    """Rows of ledgers by unit number and ordinal. An ordinal beyond the end of its unit is absent."""
    ordinals_of: dict[int, list[int]] = {}
    for unit, ordinal in set(places):
        ordinals_of.setdefault(unit, []).append(ordinal)
    entries: dict[tuple[int, int], Entry] = {}
    for unit, ordinals in sorted(ordinals_of.items()):
        start = 0
        path = folder / LEDGERS / f"{unit:05d}.arrow"
        for batch in ledger_batches(path) if path.exists() else ():
            for ordinal in ordinals:
                if start <= ordinal < start + batch.num_rows:
                    entries[unit, ordinal] = Entry(**batch.slice(ordinal - start, 1).to_pylist()[0])
            start += batch.num_rows
    return entries


def _hex_prefix(document: str) -> bytes | None:
    """The first bytes of a document id from its hexadecimal digits; None if too short or not hexadecimal."""
    if len(document) < _SHORTEST_PREFIX or len(document) % 2:
        return None
    try:
        return bytes.fromhex(document)
    except ValueError:
        return None
