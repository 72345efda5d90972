"""Reading of memory-mapped shards: any documents in any order."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.errors import ConfigError, ShardError
from declutr.common.storage import hash_file
from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.integrity import memory_problem, rows_problem, schema_problem
from declutr.pipeline.shards.ledger import LedgerFile
from declutr.pipeline.shards.manifest import (
    MANIFEST,
    TOKENIZER,
    ListedShard,
    Manifest,
    Shard,
    joined_manifest,
    load_index,
    load_manifest,
)
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer

MOST_OPEN = 8192  # some 10 KiB each, and a memory map, of which a process may have 65,530

__all__ = ["MANIFEST", "Manifest", "Shard", "ShardError", "ShardSet", "check_shards", "load_manifest"]


class ShardSet:
    """The documents of one split, numbered over its shards in name order; several corpora one after the other.

    Shards are opened at first use; the most recently used ones stay mapped. A copy sent to another process opens them
    again there.
    """

    def __init__(
        self,
        folder: Path,  # output folder of `prepare`
        split: str,  # `train` or `held-out`
        # checks every shard's existence and size now. False checks each shard when it is opened; thousands of processes
        # use this after one process has checked all.
        look: bool = True,
        most_open: int = MOST_OPEN,  # shards that stay open
        # a share of the documents and the seed that chooses them by their ids; they are numbered in their order. A
        # smaller share is part of a larger one. None: all.
        part: tuple[float, int] | None = None,
        others: Sequence[Path] = (),  # folders of further corpora, whose rows are of the same kind
    ) -> None:
        self.folder, self.folders, self.part = folder, (folder, *others), part
        self._most_open = most_open
        indexes = [load_index(path) for path in self.folders]
        self._facts = indexes[0][0]
        listed = [[shard for shard in shards if shard.split == split] for _, shards in indexes]
        # Numbers are the order of training, whatever the order of the manifest.
        self._shards = [shard for group in listed for shard in sorted(group, key=lambda shard: shard.name)]
        self._firsts = np.cumsum([0, *map(len, listed)])  # first shard of each corpus, and their number
        if look and (problems := [line for place in range(len(self._shards)) for line in self._size_problems(place)]):
            raise ShardError("\n".join(problems))
        self._starts = np.cumsum([0, *(shard.num_documents for shard in self._shards)])
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def held_out(self) -> "ShardSet":
        """The held-out documents of the same corpora; files are looked at when they are read."""
        return ShardSet(self.folder, "held-out", look=False, others=self.folders[1:])

    @cached_property
    def manifest(self) -> Manifest:
        """The whole manifest; of several corpora the sums."""
        return joined_manifest([load_manifest(folder) for folder in self.folders])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Documents of each corpus."""
        bounds = self._starts[self._firsts]
        bounds = bounds if self.part is None else np.searchsorted(self._chosen, bounds)
        return tuple(np.diff(bounds).tolist())

    @property
    def num_documents(self) -> int:
        """Documents in the split, or in its part."""
        return int(self._starts[-1]) if self.part is None else len(self._chosen)

    @cached_property
    def _chosen(self) -> NDArray[np.int64]:
        """Numbers of the documents of the part in the split, ascending."""
        share, seed = self.part or (1.0, 0)
        keys = [self._shard(number).keys() for number in range(len(self._shards))]
        joined = np.concatenate([np.empty(0, np.uint64), *keys])  # a split may have no shard
        # By id, so that more shards or another order choose the same documents.
        drawn = seeding.words(seed, "share of the corpus", joined, np.zeros_like(joined), 1)[:, 0]
        return np.flatnonzero(seeding.unit(drawn) < share)

    def number_of(self, row: int) -> int | None:
        """Number of a document of the split in this part; None if it is outside."""
        if self.part is None:
            return row
        place = int(np.searchsorted(self._chosen, row))
        return place if place < len(self._chosen) and self._chosen[place] == row else None

    def first_of(self, name: str, corpus: int = 0) -> int:
        """Number of the first document of a shard of the split, of a corpus by its place."""
        for place in range(self._firsts[corpus], self._firsts[corpus + 1]):
            if self._shards[place].name == name:
                return int(self._starts[place])
        raise ShardError(f"{self.folders[corpus] / MANIFEST} does not name {name}; prepare the folder again")

    def take(
        self,
        rows: NDArray[np.int64],  # `(n,)` document numbers in [0, num_documents), repeats allowed
    ) -> pa.Table:
        """Documents by number, in the given order, as a table of one chunk with the columns of schema.py."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_documents):
            raise IndexError(f"document numbers {rows.min()}..{rows.max()} outside 0..{self.num_documents - 1}")
        rows = rows if self.part is None else self._chosen[rows]
        which = np.searchsorted(self._starts, rows, side="right") - 1
        pieces: list[pa.RecordBatch] = []
        requested_places: list[NDArray[np.int64]] = []
        for number in np.unique(which):
            in_shard = np.flatnonzero(which == number)
            for batch, positions, places in self._shard(int(number)).locate(rows[in_shard] - self._starts[number]):
                pieces.append(batch.take(pa.array(positions)))  # copies the rows, so that no map is held by them
                requested_places.append(in_shard[places])
        if not pieces:
            if not self._shards:
                raise ShardError(f"{self.folder} holds no documents of this split")
            return self._shard(0).schema.empty_table()
        # The rows were gathered by record batch; restore the requested order.
        order = np.argsort(np.concatenate(requested_places), kind="stable")
        table = pa.Table.from_batches(pieces).combine_chunks().take(pa.array(order)).combine_chunks()
        if unsound := rows_problem(table.to_batches()[0], self._facts):
            at, problem = unsound
            path = self._folder_of(int(which[at])) / self._shards[which[at]].name
            raise ShardError(_unsound(path, rows[at] - self._starts[which[at]], problem))
        return table

    def _shard(self, number: int) -> "_OpenShard":
        if number not in self._open:
            if problems := self._size_problems(number):
                raise ShardError("\n".join(problems))
            self._open[number] = _OpenShard(self._folder_of(number), self._shards[number], self._facts.content.kind)
            if len(self._open) > self._most_open:
                self._open.popitem(last=False)  # the one not used for the longest time; each holds a memory map
        self._open.move_to_end(number)
        return self._open[number]

    def _folder_of(self, number: int) -> Path:
        # "right" passes corpora without shards.
        return self.folders[int(np.searchsorted(self._firsts, number, side="right")) - 1]

    def _size_problems(self, number: int) -> list[str]:
        return _size_problems(self._folder_of(number), self._shards[number])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # a memory map cannot be sent to another process


class _OpenShard:
    """One mapped shard: the first row of each of its record batches, which it reads when they are asked for."""

    def __init__(self, folder: Path, shard: Shard | ListedShard, kind: ContentKind) -> None:
        path = folder / shard.name
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
            if problem := schema_problem(reader.schema, kind):
                raise ShardError(f"{path} is not a shard: {problem}; prepare the folder again")
        except PermissionError as error:
            raise ShardError(f"{path}: cannot be read ({error.strerror})") from error
        except (pa.ArrowException, OSError) as error:
            raise ShardError(f"{path} is not an Arrow file: {error}; prepare the folder again") from error
        self.schema, self._path, self._reader = reader.schema, path, reader
        self._safe: set[int] = set()
        self._starts = np.cumsum([0, *sizes])
        if self._starts[-1] != shard.num_documents:
            raise ShardError(f"{path}: {self._starts[-1]} documents, the manifest says {shard.num_documents}")

    def locate(self, rows: NDArray[np.int64]) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64], NDArray[np.int64]]]:
        """Each record batch that holds some of the rows, with positions in it and places in `rows`."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(which):
            places = np.flatnonzero(which == number)
            yield self._batch(int(number)), rows[places] - self._starts[number], places

    def keys(self) -> NDArray[np.uint64]:
        """`(n,)` keys of all documents."""
        batches = map(self._reader.get_batch, range(len(self._starts) - 1))
        return document_keys(pa.Table.from_batches([batch.select(["id"]) for batch in batches]))

    def _batch(self, number: int) -> pa.RecordBatch:
        """A record batch whose offsets were checked, because Arrow reads wherever they point."""
        batch = self._reader.get_batch(number)  # not kept: a thousand shards have more batches than memory for them
        if number not in self._safe:
            if problem := memory_problem(batch):
                raise ShardError(_unsound(self._path, int(self._starts[number]), problem))
            self._safe.add(number)
        return batch

    def check(self, manifest: Manifest) -> None:
        """Checks all documents."""
        for number, start in enumerate(self._starts[:-1]):
            if unsound := rows_problem(self._batch(number), manifest):
                raise ShardError(_unsound(self._path, int(start) + unsound[0], unsound[1]))


def check_shards(
    folder: Path,  # output folder of `prepare`
    # reads every byte, compares checksums, and checks all offsets, windows, texts and token ids. Otherwise only sizes
    # and Arrow footers are checked, and the contents of shards that were modified after the manifest.
    full: bool = False,
    tokenizer: bool = False,  # looks at the files of the tokenizer, too
) -> list[str]:
    """Finds problems of prepared shards, one line each."""
    manifest = load_manifest(folder)
    written, problems = (folder / MANIFEST).stat().st_mtime_ns, list[str]()
    for shard in manifest.shards:
        shard_problems = _size_problems(folder, shard)
        if not shard_problems:
            try:
                opened = _OpenShard(folder, shard, manifest.content.kind)
                # A file that is newer than the manifest was changed in place.
                if full or (folder / shard.name).stat().st_mtime_ns > written:
                    shard_problems = _hash_problems(folder, shard)
                    opened.check(manifest)
            except ShardError as error:
                shard_problems.append(str(error))
        problems += shard_problems
    for ledger in manifest.ledgers:
        problems += _size_problems(folder, ledger) or (_hash_problems(folder, ledger) if full else [])
    if tokenizer and manifest.tokenizer and (problem := tokenizer_problem(folder)):
        problems.append(problem)
    elif tokenizer and full:
        problems += other_tokenizer(folder, manifest)
    return problems


def other_tokenizer(folder: Path, manifest: Manifest) -> list[str]:
    """The problem of shards with the tokenizer of others; none if it cannot be loaded, as with code of its own."""
    info, place = manifest.tokenizer, folder / TOKENIZER
    try:
        same = info is None or fingerprint(load_tokenizer(str(place))) == info.fingerprint
    except (ConfigError, KeyError):
        return []
    return [] if same else [f"the tokenizer in {place} is not the one that made the shards"]


def tokenizer_problem(folder: Path) -> str | None:
    """A problem of the tokenizer beside prepared shards, by its files alone; None if there is none."""
    place, again = folder / TOKENIZER, "run `prepare` with the same settings again, which makes it"
    if not (files := sorted(place.glob("*.json"))):
        return f"{place} is missing; {again}"
    for file in files:
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            return f"{file} is damaged ({error}); delete {place}, and {again}"
    return None


def _size_problems(folder: Path, written: Shard | ListedShard | LedgerFile) -> list[str]:
    """Problems of a file that is missing or of another size than the manifest records."""
    path = folder / written.name
    if Path(written.name).is_absolute() or ".." in Path(written.name).parts:  # a manifest may come from someone else
        return [f"{folder / MANIFEST} names {written.name}, which is outside its folder; prepare the folder again"]
    if not path.is_file():
        return [f"{path} is missing; run `prepare` again, it makes what is missing"]
    size = path.stat().st_size
    if size == written.num_bytes:
        return []
    state = "truncated" if size < written.num_bytes else "changed"
    return [f"{path} is {state}: {size} bytes, the manifest says {written.num_bytes}; run `prepare` again to remake it"]


def _unsound(path: Path, row: int, problem: str) -> str:
    return f"{path}: document {row}: {problem}; delete it and prepare again"


def _hash_problems(folder: Path, written: Shard | LedgerFile) -> list[str]:
    """A problem if the checksum of a file is wrong."""
    path = folder / written.name
    if (digest := hash_file(path)) == written.sha256:
        return []
    return [f"{path} is damaged: SHA-256 {digest}, the manifest says {written.sha256}; delete it and prepare again"]


def document_keys(documents: pa.Table) -> NDArray[np.uint64]:
    """`(n,)` first eight bytes of each document's id: the key of all its random draws."""
    ids = _whole(documents.column("id"))
    # The buffer is that of the whole column, also of a slice.
    raw = np.frombuffer(ids.buffers()[1], np.uint8).reshape(-1, 16)[ids.offset : ids.offset + len(ids)]
    return np.ascontiguousarray(raw[:, :8]).view("<u8").reshape(-1)


def ragged(column: pa.ChunkedArray) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and `(n + 1,)` offsets of a list column."""
    lists = _whole(column)
    return lists.values.to_numpy(), lists.offsets.to_numpy().astype(np.int64)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array; a single chunk, the usual case, is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
