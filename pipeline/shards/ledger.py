"""The ledger of a unit, one row for every document that was read; its counts by status; losses of broken files.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pydantic import ConfigDict, Field

from declutr.common.config import Strict
from declutr.common.errors import ShardError
from declutr.common.storage import atomic_file, hash_file
from declutr.pipeline.readers.corpus import ID_BYTES, ReadFailure, Record, bare_suffix


class Counts(Strict):
    """Counts of the documents that were read. They balance: read = kept + all dropped + all failed."""

    model_config = ConfigDict(frozen=False)

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = Field(default_factory=Counter)  # documents by drop reason
    # Documents by failure reason; a file that breaks off counts once.
    failed: Counter[str] = Field(default_factory=Counter)
    text_bytes: int = 0  # UTF-8 bytes of the readable documents, whitespace-normalised
    longest_tokens: int = 0  # tokens of the longest document, kept or not
    unknown_tokens: int = 0  # tokens of the kept documents that stand for words which the tokenizer does not know
    labels: Counter[str] = Field(default_factory=Counter)  # kept hypotheses, images or clips by label
    # Kept images or clips by what was changed, such as `first_frame` or `cut`.
    notes: Counter[str] = Field(default_factory=Counter)

    def add(self, entry: "Entry", kept: bool) -> None:
        """Counts one more document; one without an id could not be read."""
        self.read += 1
        self.kept += kept
        if not kept:
            (self.failed if entry.id is None else self.dropped)[entry.status] += 1
        self.text_bytes += entry.text_bytes
        self.longest_tokens = max(self.longest_tokens, entry.num_tokens or 0)

    def check(self, what: str) -> None:
        """Checks that the counts balance."""
        explained = self.kept + sum(self.dropped.values()) + sum(self.failed.values())
        if self.read != explained:  # a document lost without a reason would be lost for good
            raise ShardError(f"{what}: {self.read} documents read, but {explained} kept, dropped or failed")


def sum_counts(counts: Sequence[Counts]) -> Counts:
    """Sums counts over units; by name, so that any order of documents and units gives equal bytes."""
    sums: dict[str, Any] = {}
    for name in Counts.model_fields:
        values = [getattr(count, name) for count in counts]
        if isinstance(getattr(Counts(), name), Counter):
            total = Counter[str]()
            for value in values:
                total.update(value)  # `sum` would copy the total for every unit
            sums[name] = dict(sorted((+total).items()))
        else:
            sums[name] = max(values, default=0) if name == "longest_tokens" else sum(values)
    return Counts(**sums)


_MOST_FILES = 100  # files with failures that are listed of a unit; all failures are counted


class Losses(Strict):
    """Counts of the files of a unit, or of all units."""

    # Files with failures or cuts, broken ones and the most failures first: records `read` and `failed`, and cuts in
    # those that were too long. If the rest is lost, `broken` is 1, and `left_bytes` its input bytes, if it has some.
    files: dict[str, Counter[str]] = Field(default_factory=dict)
    # Number of the other files, and of the records in them, by ending.
    whole: dict[str, tuple[int, int]] = Field(default_factory=dict)
    read: int = 0  # records that could be read
    num_bytes: int = 0  # input bytes

    def documents(self) -> int:
        """Documents that are lost with broken files, about, in addition to one failure for each.

        A file that was cut short does not tell its length, so it counts like a whole file with its ending; one whose
        bytes are there counts by them, if that is more.
        """
        # Nothing may have been read of any file.
        per_byte = self.read / max(1, self.num_bytes - sum(file["left_bytes"] for file in self.files.values()))
        lost = 0.0
        for source, file in self.files.items():
            if file["broken"]:
                num_files, num_records = self.whole.get(bare_suffix(source), (0, 0))
                mean = num_records / max(1, num_files)
                # 1 less: its failure is counted.
                lost += max(0.0, mean - file["read"] - file["failed"], file["left_bytes"] * per_byte - 1)
        return round(lost)


class LossCounter:
    """Counts the records of a unit by file: by the one that is read, and by the members of an archive."""

    def __init__(self) -> None:
        self._files: dict[str, Counter[str]] = {}
        self._whole: dict[str, list[int]] = {}
        self._member = ""
        self._of_member, self._of_part = Counter[str](), Counter[str]()
        self._read = self._num_bytes = 0

    def add(self, record: Record, part: str) -> None:
        """Counts the next record of a part of the file `part`."""
        counts = self._of_part
        if record.source != part:
            if record.source != self._member:
                self._end_member()
                self._member = record.source
            counts = self._of_member
        if isinstance(record, ReadFailure):
            counts["failed"] += 1
            counts["broken"] |= record.rest  # a file breaks off once, however often that is told
        else:
            counts["read"] += 1
            if record.cut:
                counts["cut"] += 1

    def end(self, part: str, is_first: bool, num_bytes: int, bytes_read: int) -> None:
        """Ends a part of the file `part`, of whose input bytes so many were read; `is_first`: the file begins in it."""
        self._end_member()
        if self._of_part["broken"]:
            self._of_part["left_bytes"] = max(0, num_bytes - bytes_read)
        self._read += self._of_part["read"]
        self._end(part, self._of_part, is_first)
        self._of_part = Counter()
        self._num_bytes += num_bytes

    def _end_member(self) -> None:
        if self._member:
            self._of_part["read"] += self._of_member["read"]
            self._end(self._member, self._of_member, True)
        self._member, self._of_member = "", Counter()

    def _end(self, source: str, counts: Counter[str], is_first: bool) -> None:
        if counts["failed"] or counts["cut"]:
            self._files.setdefault(source, Counter()).update(counts)
        else:
            whole = self._whole.setdefault(bare_suffix(source), [0, 0])
            whole[0] += is_first
            whole[1] += counts["read"]

    def losses(self, most: int | None = _MOST_FILES) -> Losses:
        """The counts of all parts that have ended, of at most so many files with failures."""
        # By name last, so that ties have one order.
        ranked = sorted(self._files.items(), key=lambda item: (-item[1]["broken"], -item[1]["failed"], item[0]))
        whole = {ending: (files, records) for ending, (files, records) in sorted(self._whole.items())}
        return Losses(files=dict(ranked[:most]), whole=whole, read=self._read, num_bytes=self._num_bytes)

    def join(self, losses: Losses) -> None:
        """Adds the counts of another unit; a file that both read is one."""
        for source, file in losses.files.items():
            self._files.setdefault(source, Counter()).update(file)
            self._files[source]["broken"] = min(1, self._files[source]["broken"])  # `update` added both
        for ending, counts in losses.whole.items():
            whole = self._whole.setdefault(ending, [0, 0])
            whole[:] = [before + more for before, more in zip(whole, counts, strict=True)]
        self._read += losses.read
        self._num_bytes += losses.num_bytes


def sum_losses(losses: Iterable[Losses]) -> Losses:
    """Sums over units."""
    counter = LossCounter()
    for unit in losses:
        counter.join(unit)
    return counter.losses(None)


LEDGERS = "ledger"  # folder of the ledgers in the output folder
REJECTED = "rejected"  # folder of the documents that were not kept in the output folder
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


_VALUES = attrgetter(*(column.name for column in fields(Entry)))


@dataclass(frozen=True, slots=True)
class LedgerFile:
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
        columns = zip(*map(_VALUES, self._entries), strict=True)
        arrays = [pa.array(values, column.type) for values, column in zip(columns, SCHEMA, strict=True)]
        self._stream.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._entries = []

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._entries:  # after an error the file does not appear
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
            batch = reader.get_batch(index)
            try:
                batch.validate(full=True)  # a wrong offset would end the process
            except pa.ArrowException as error:
                raise ShardError(f"{path} is damaged ({error}); prepare the folder again") from error
            yield batch


def ledger_entries(path: Path) -> Iterator[Entry]:
    """Rows of one ledger in reading order."""
    for batch in ledger_batches(path):
        yield from (Entry(**row) for row in batch.to_pylist())
