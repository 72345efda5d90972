"""Writing of one shard, whole or not at all, block by block so that memory does not grow with the unit."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.errors import ShardError
from declutr.common.storage import atomic_file, hash_file
from declutr.pipeline.shards.content import Layout
from declutr.pipeline.shards.manifest import Shard, Split
from declutr.pipeline.shards.media import Media, media_arrays
from declutr.pipeline.shards.schema import geometry_of
from declutr.pipeline.shards.windows import document_windows

_BLOCK_TOKENS = 2**25
_BLOCK_BYTES = 2**25
"""Most bytes of images or frames in a record batch, unless one row has more."""


class ShardWriter(ExitStack):
    """Writes the documents of one split of one unit; the file appears if the block ends without an error.

    No file is written if no document was added.
    """

    def __init__(self, folder: Path, unit: str, split: Split, schema: pa.Schema, record_batch_rows: int) -> None:
        super().__init__()
        self._path = folder / f"{split}-{unit}.arrow"
        self._split: Split = split
        self._schema, self._record_batch_rows = schema, record_batch_rows
        self._rows: list[tuple[bytes, Any, str, int, Layout | None]] = []
        self._held_tokens = self._held_bytes = self._num_documents = self._num_tokens = 0
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
        self._held_tokens += len(tokens)
        return self._add((identity, tokens, source, offset, layout), self._held_tokens >= _BLOCK_TOKENS)

    def add_media(self, identity: bytes, media: Media, source: str, offset: int) -> int:
        """Adds an image or a clip: its id and its source. Returns its row in the shard."""
        self._held_tokens += media.size
        self._held_bytes += media.num_bytes
        return self._add((identity, media, source, offset, None), self._held_bytes >= _BLOCK_BYTES)

    def _add(self, row: tuple[bytes, Any, str, int, Layout | None], full: bool) -> int:
        """Adds a row, and writes the collected ones if they fill a record batch."""
        self._rows.append(row)
        number = self._num_documents + len(self._rows) - 1
        if full or len(self._rows) >= self._record_batch_rows:
            self._flush()
        return number

    def _flush(self) -> None:
        """Writes the collected documents as one record batch."""
        if not self._rows:
            return
        if self._stream is None:
            aside = self.enter_context(atomic_file(self._path))
            self._stream = self.enter_context(pa.ipc.new_file(str(aside), self._schema))
        ids, contents, sources, offsets, layouts = zip(*self._rows, strict=True)
        columns = {"id": ids, "source": sources, "offset": offsets}
        columns |= self._text_arrays(contents, layouts) if "tokens" in self._schema.names else media_arrays(contents)
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, field.type)
            for field in self._schema
            for column in [columns[field.name]]
        ]
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self._num_documents += len(self._rows)
        self._num_tokens += self._held_tokens
        self._rows, self._held_tokens, self._held_bytes = [], 0, 0

    def _text_arrays(self, tokens: Sequence[NDArray[np.uint32]], layouts: Sequence[Layout]) -> dict[str, Any]:
        """Columns of documents or of rows of short texts."""
        inner: dict[str, Sequence[NDArray[Any]]]
        if "windows" in self._schema.names:
            geometry, short_documents = geometry_of(self._schema)
            inner = {"windows": [document_windows(len(row), geometry, short_documents) for row in tokens]}
        else:
            inner = {"starts": [layout.starts for layout in layouts], "labels": [layout.labels for layout in layouts]}
        return {
            "tokens": _lists(tokens, self._schema.field("tokens").type),
            **{name: _lists(rows, self._schema.field(name).type) for name, rows in inner.items()},
            "num_tokens": [len(row) for row in tokens],
        }

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
