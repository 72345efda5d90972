"""Reading shards: memory-mapped, any documents in any order."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.storage import hash_file
from pipeline.ledger import LedgerFile
from pipeline.manifest import MANIFEST, Manifest, Shard, ShardError, load_manifest
from pipeline.schema import SCHEMA_VERSION

_MOST_OPEN = 512  # each is a descriptor and a memory map, and a large corpus has more shards than a process may have

__all__ = ["MANIFEST", "Manifest", "Shard", "ShardError", "ShardSet", "check_shards", "load_manifest"]


class _Listed(msgspec.Struct, frozen=True):
    """What of a shard's entry in the manifest is needed to find documents."""

    name: str
    split: Literal["train", "held-out"]
    num_documents: int
    num_bytes: int


class _Index(msgspec.Struct, frozen=True):
    """The part of a manifest that a reader needs: at 100,000 shards a tenth of the whole's time and memory."""

    schema_version: int
    shards: list[_Listed]


class ShardSet:
    """The documents of one split, numbered over its shards in name order.

    Shards are opened at the first use and stay mapped, the ones used last; a copy sent to another process opens them
    there.

    Args:
        folder: output of `prepare`.
        split: `train` or `held-out`.
        look: whether every shard is looked for at once; otherwise each when it is opened, which is what a process among
            thousands does after one has looked.

    Raises:
        ShardError: there is no manifest, or it names a shard that is missing or has another size.
    """

    def __init__(self, folder: Path, split: str, look: bool = True) -> None:
        self.folder = folder
        listed = [shard for shard in _load_index(folder).shards if shard.split == split]
        self._shards = sorted(listed, key=lambda shard: shard.name)
        problems = [problem for shard in self._shards for problem in _size_problems(folder, shard)] if look else []
        if problems:
            raise ShardError("\n".join(problems))
        self._starts = np.cumsum([0, *(shard.num_documents for shard in self._shards)])
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    @cached_property
    def manifest(self) -> Manifest:
        """The whole manifest."""
        return load_manifest(self.folder)

    @property
    def num_documents(self) -> int:
        """Documents in the split."""
        return int(self._starts[-1])

    def take(self, rows: NDArray[np.int64]) -> pa.Table:
        """Documents by number, in the order asked, as a table of one chunk with the columns of pipeline/schema.py.

        Args:
            rows: `(n,)` document numbers in [0, num_documents), repeats allowed.

        Raises:
            IndexError: a number outside the split.
            ShardError: a shard that is not what the manifest says.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_documents):
            raise IndexError(f"document numbers {rows.min()}..{rows.max()} outside 0..{self.num_documents - 1}")
        which = np.searchsorted(self._starts, rows, side="right") - 1
        pieces: list[pa.RecordBatch] = []
        asked: list[NDArray[np.int64]] = []
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            for batch, positions, places in self._shard(int(number)).locate(rows[mine] - self._starts[number]):
                pieces.append(batch.take(pa.array(positions)))
                asked.append(mine[places])
        if not pieces:
            return self._empty()
        # Gathered by record batch, hence in another order than asked.
        order = np.argsort(np.concatenate(asked), kind="stable")
        gathered = pa.Table.from_batches(pieces).combine_chunks()
        return gathered.take(pa.array(order)).combine_chunks()

    def _empty(self) -> pa.Table:
        if not self._shards:
            raise ShardError(f"{self.folder} holds no documents of this split")
        return self._shard(0).schema.empty_table()

    def _shard(self, number: int) -> "_OpenShard":
        if number not in self._open:
            shard = self._shards[number]
            if problems := _size_problems(self.folder, shard):
                raise ShardError("\n".join(problems))
            self._open[number] = _OpenShard(self.folder, shard)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}


def _load_index(folder: Path) -> _Index:
    """The shards of a manifest; where that is not what it should be, the whole is read, for a sentence that says why.

    Raises:
        ShardError: as `load_manifest`.
    """
    try:
        index = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError):
        index = None
    if index is not None and index.schema_version == SCHEMA_VERSION:
        return index
    manifest = load_manifest(folder)
    shards = [_Listed(shard.name, shard.split, shard.num_documents, shard.num_bytes) for shard in manifest.shards]
    return _Index(manifest.schema_version, shards)


class _OpenShard:
    """One mapped shard: its record batches and where each begins."""

    def __init__(self, folder: Path, shard: Shard | _Listed) -> None:
        path = folder / shard.name
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise ShardError(f"{path} is not an Arrow file: {error}; prepare the folder again") from error
        self.schema = reader.schema
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        if self._starts[-1] != shard.num_documents:
            raise ShardError(f"{path}: {self._starts[-1]} documents, the manifest says {shard.num_documents}")

    def locate(self, rows: NDArray[np.int64]) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64], NDArray[np.int64]]]:
        """For each record batch that holds some of the rows: the batch, positions in it, places in `rows`."""
        which = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(which):
            places = np.flatnonzero(which == number)
            yield self._batches[number], rows[places] - self._starts[number], places

    def largest_token(self) -> int:
        """The largest token id in the shard; -1 when it has no tokens."""
        columns = [batch.column("tokens").flatten() for batch in self._batches]
        return max((int(column.to_numpy().max()) for column in columns if len(column)), default=-1)


def check_shards(folder: Path, full: bool = False) -> list[str]:
    """What is wrong with prepared shards, one line a problem.

    Args:
        folder: output of `prepare`.
        full: also read every byte, to compare checksums and token ids; otherwise sizes and Arrow footers only, and
            every byte of the shards that were written to after the manifest.

    Raises:
        ShardError: there is no manifest to compare with.
    """
    manifest = load_manifest(folder)
    written = (folder / MANIFEST).stat().st_mtime_ns
    problems: list[str] = []
    for shard in manifest.shards:
        found = _size_problems(folder, shard)
        if not found:
            try:
                opened = _OpenShard(folder, shard)
            except ShardError as error:
                found = [str(error)]
            else:
                read = full or (folder / shard.name).stat().st_mtime_ns > written
                found = _content_problems(folder, shard, opened, manifest.tokenizer.vocab_size) if read else []
        problems += found
    for ledger in manifest.ledgers:
        problems += _size_problems(folder, ledger) or (_hash_problems(folder, ledger) if full else [])
    return problems


def _size_problems(folder: Path, written: Shard | _Listed | LedgerFile) -> list[str]:
    """A file that is missing or has another size than when it was written."""
    path = folder / written.name
    if not path.is_file():
        return [f"{path} is missing; run `prepare` again, it makes what is missing"]
    size = path.stat().st_size
    if size == written.num_bytes:
        return []
    state = "truncated" if size < written.num_bytes else "changed"
    return [f"{path} is {state}: {size} bytes, the manifest says {written.num_bytes}; run `prepare` again to remake it"]


def _content_problems(folder: Path, shard: Shard, opened: _OpenShard, vocab_size: int) -> list[str]:
    """Bytes or token ids that are not what the manifest says."""
    problems = _hash_problems(folder, shard)
    if (largest := opened.largest_token()) >= vocab_size:
        problems.append(f"{folder / shard.name}: token id {largest} is beyond the vocabulary of {vocab_size} tokens")
    return problems


def _hash_problems(folder: Path, written: Shard | LedgerFile) -> list[str]:
    """A file whose bytes are not those that were written."""
    path = folder / written.name
    if (found := hash_file(path)) == written.sha256:
        return []
    return [f"{path} is damaged: SHA-256 {found}, the manifest says {written.sha256}; delete it and prepare again"]
