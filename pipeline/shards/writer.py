"""Writing of one shard, whole or not at all, block by block so that memory does not grow with the unit."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.storage import hash_file, write_aside
from pipeline.shards.content import Layout
from pipeline.shards.manifest import Shard, ShardError, Split
from pipeline.shards.schema import geometry_of
from pipeline.shards.windows import document_windows

_BLOCK_TOKENS = 2**25


@dataclass
class ShardWriter:
    """Writes the documents of one split of one unit; the file appears if the block ends without an error.

    No file is written if no document was added.
    """

    folder: Path
    unit: str
    split: Split
    schema: pa.Schema
    block_documents: int
    _rows: list[tuple[bytes, NDArray[np.uint32], str, int, Layout | None]] = field(default_factory=list)
    _held_tokens: int = 0
    _num_documents: int = 0
    _num_tokens: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _stream: Any = None

    @property
    def name(self) -> str:
        """File name of the shard."""
        return f"{self.split}-{self.unit}.arrow"

    def __enter__(self) -> "ShardWriter":
        return self

    def add(
        self, identity: bytes, tokens: NDArray[np.uint32], source: str, offset: int, layout: Layout | None = None
    ) -> int:
        """Adds a document: its id, `(num_tokens,)` token ids, and its source. Returns its row in the shard.

        A row of short texts also has their layout.

        Raises:
            ShardError: a token id is beyond the vocabulary.
        """
        vocab_size = int(self.schema.metadata[b"vocab_size"])
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ShardError(
                f"{source} at {offset}: token id {int(tokens.max())} is beyond the vocabulary of {vocab_size} tokens"
            )
        row = self._num_documents + len(self._rows)
        self._rows.append((identity, tokens, source, offset, layout))
        self._held_tokens += len(tokens)
        if len(self._rows) >= self.block_documents or self._held_tokens >= _BLOCK_TOKENS:
            self._flush()
        return row

    def _flush(self) -> None:
        """Writes the collected documents as one record batch."""
        if not self._rows:
            return
        if self._stream is None:
            aside = self._stack.enter_context(write_aside(self.folder / self.name))
            self._stream = self._stack.enter_context(pa.ipc.new_file(str(aside), self.schema))
        ids, tokens, sources, offsets, layouts = zip(*self._rows, strict=True)
        if "windows" in self.schema.names:
            geometry, short_documents = geometry_of(self.schema)
            inner = {"windows": [document_windows(len(row), geometry, short_documents) for row in tokens]}
        else:
            inner = {"starts": [one.starts for one in layouts], "labels": [one.labels for one in layouts]}
        columns = {
            "id": pa.array(ids, self.schema.field("id").type),
            "tokens": _lists(tokens, self.schema.field("tokens").type),
            **{name: _lists(rows, self.schema.field(name).type) for name, rows in inner.items()},
            "num_tokens": pa.array([len(row) for row in tokens], pa.int64()),
            "source": pa.array(sources, pa.string()),
            "offset": pa.array(offsets, pa.int64()),
        }
        self._stream.write_batch(pa.record_batch(list(columns.values()), schema=self.schema))
        self._num_documents += len(self._rows)
        self._num_tokens += self._held_tokens
        self._rows, self._held_tokens = [], 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._stack.__exit__(kind, error, trace)

    def result(self) -> list[Shard]:
        """The finished shard; an empty list if no document was added."""
        if self._num_documents == 0:
            return []
        path = self.folder / self.name
        return [
            Shard(
                name=self.name,
                split=self.split,
                num_documents=self._num_documents,
                num_tokens=self._num_tokens,
                num_bytes=path.stat().st_size,
                sha256=hash_file(path),
            )
        ]


def _lists(rows: Sequence[NDArray[Any]], list_type: pa.DataType) -> pa.Array:
    """A list column with one array a row."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    values = np.concatenate(rows).astype(list_type.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=list_type)
