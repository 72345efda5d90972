"""Writing of one shard, whole or not at all, block by block so that memory does not grow with the unit."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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


class ShardWriter(ExitStack):
    """Writes the documents of one split of one unit; the file appears if the block ends without an error.

    No file is written if no document was added.
    """

    def __init__(self, folder: Path, unit: str, split: Split, schema: pa.Schema, block_documents: int) -> None:
        super().__init__()
        self._path = folder / f"{split}-{unit}.arrow"
        self._split: Split = split
        self._schema, self._block_documents = schema, block_documents
        self._rows: list[tuple[bytes, NDArray[np.uint32], str, int, Layout | None]] = []
        self._held_tokens = self._num_documents = self._num_tokens = 0
        self._stream: Any = None

    def add(
        self, identity: bytes, tokens: NDArray[np.uint32], source: str, offset: int, layout: Layout | None = None
    ) -> int:
        """Adds a document: its id, `(num_tokens,)` token ids, and its source. Returns its row in the shard.

        A row of short texts also has their layout.

        Raises:
            ShardError: a token id is beyond the vocabulary.
        """
        vocab_size = int(self._schema.metadata[b"vocab_size"])
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ShardError(
                f"{source} at {offset}: token id {int(tokens.max())} is beyond the vocabulary of {vocab_size} tokens"
            )
        row = self._num_documents + len(self._rows)
        self._rows.append((identity, tokens, source, offset, layout))
        self._held_tokens += len(tokens)
        if len(self._rows) >= self._block_documents or self._held_tokens >= _BLOCK_TOKENS:
            self._flush()
        return row

    def _flush(self) -> None:
        """Writes the collected documents as one record batch."""
        if not self._rows:
            return
        if self._stream is None:
            aside = self.enter_context(write_aside(self._path))
            self._stream = self.enter_context(pa.ipc.new_file(str(aside), self._schema))
        ids, tokens, sources, offsets, layouts = zip(*self._rows, strict=True)
        if "windows" in self._schema.names:
            geometry, short_documents = geometry_of(self._schema)
            inner = {"windows": [document_windows(len(row), geometry, short_documents) for row in tokens]}
        else:
            inner = {"starts": [one.starts for one in layouts], "labels": [one.labels for one in layouts]}
        columns = {
            "id": pa.array(ids, self._schema.field("id").type),
            "tokens": _lists(tokens, self._schema.field("tokens").type),
            **{name: _lists(rows, self._schema.field(name).type) for name, rows in inner.items()},
            "num_tokens": pa.array([len(row) for row in tokens], pa.int64()),
            "source": pa.array(sources, pa.string()),
            "offset": pa.array(offsets, pa.int64()),
        }
        self._stream.write_batch(pa.record_batch(list(columns.values()), schema=self._schema))
        self._num_documents += len(self._rows)
        self._num_tokens += self._held_tokens
        self._rows, self._held_tokens = [], 0

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        if kind is None:
            self._flush()
        return super().__exit__(kind, *rest)

    def result(self) -> list[Shard]:
        """The finished shard; an empty list if no document was added."""
        if self._num_documents == 0:
            return []
        return [
            Shard(
                name=self._path.name,
                split=self._split,
                num_documents=self._num_documents,
                num_tokens=self._num_tokens,
                num_bytes=self._path.stat().st_size,
                sha256=hash_file(self._path),
            )
        ]


def _lists(rows: Sequence[NDArray[Any]], list_type: pa.DataType) -> pa.Array:
    """A list column with one array a row."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    values = np.concatenate(rows).astype(list_type.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=list_type)
