"""A shard: an Arrow IPC file with one row a document, written whole or not at all, in batches of bounded size.

Rows of documents have these columns:

| column     | type                      | meaning                                                              |
|------------|---------------------------|----------------------------------------------------------------------|
| id         | fixed_size_binary(16)     | hash of the normalised text (docs/decisions/0001-data-order.md)       |
| tokens     | list<uint16> or <uint32>  | token ids without special tokens; uint16 if the vocabulary allows     |
| windows    | list<int32>               | starts of the windows that may hold an anchor, in tokens              |
| num_tokens | int64                     | length of `tokens`                                                   |
| source     | string                    | input file, relative to its input root, see below                     |
| offset     | int64                     | start of the document in its source, see below                        |

The `source` of a document inside an archive joins archive and member with "!", also for nested archives:
`openwebtext.tar.xz!openwebtext/urlsf_subset00-1_data.xz!0001-abc.txt`. A dataset of the Hub is named with its commit:
`owner/name@0123456789ab/train.parquet`.

For JSONL and text, `offset` is a byte position in the innermost uncompressed file: the start of the line, or of the
piece if a document longer than `corpus.max_document_mib` was cut. For Parquet, Arrow and CSV it is the row number, the
same for all pieces of a row. It is 0 for a Python module, and the ordinal of the topic for `pydoc_data.topics`.

Rows of sentences, pairs and triples are groups of short texts. They have two other columns instead of `windows`:

| column | type        | meaning                                                                                 |
|--------|-------------|-----------------------------------------------------------------------------------------|
| starts | list<int32> | start of each text in `tokens`, ascending; every text has at least one token            |
| labels | list<int8>  | label of each text: -1 for the sentence or premise, which is the first; of a hypothesis |
|        |             | its place in LABELS (pipeline/shards/content.py)                                        |

`tokens` holds the texts one after the other. `id` is a hash of all texts and labels. A sentence split from a document
has the `offset` of the document. A premise has the `offset` of its first pair.

Rows of images and audio have no tokens. Their other columns:

| kind   | column     | type          | meaning                                                       |
|--------|------------|---------------|---------------------------------------------------------------|
| images | image      | binary        | PNG, RGB, 8 bits a channel, upright                           |
| images | width      | int32         | pixels                                                        |
| images | height     | int32         | pixels                                                        |
| audio  | frames     | list<float32> | num_frames * num_mel_bins log-mel energies, frame after frame |
| audio  | num_frames | int32         |                                                               |
| both   | label      | string        | label; "" if content.label is null                            |

`id` is a hash of the pixels and their size, or of the frames, without the label. `num_mel_bins` and `sample_rate` are
in the manifest's settings. `offset` is the row of a Parquet file, and 0 of any other file.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.errors import ShardError
from declutr.common.storage import atomic_file, hash_file
from declutr.pipeline.readers.corpus import ID_BYTES
from declutr.pipeline.shards.content import Layout, MediaKind, TextKind
from declutr.pipeline.shards.manifest import SCHEMA_VERSION, Shard, Split
from declutr.pipeline.shards.media import Clip, Image, Media, media_arrays
from declutr.pipeline.shards.windows import Geometry, ShortDocuments, document_windows

UINT16_VOCABULARY = 2**16
_BLOCK = 2**25  # most tokens, or bytes of images or frames, in a record batch, unless one row has more


def shard_schema(
    vocab_size: int,
    geometry: Geometry,
    fingerprint: str,
    short_documents: ShortDocuments = "drop",
    kind: TextKind = "documents",
) -> pa.Schema:
    """Schema of a shard of texts; its metadata names the tokenizer and the geometry of the tokens and windows."""
    token_type = pa.uint16() if vocab_size <= UINT16_VOCABULARY else pa.uint32()  # half the size for most tokenizers
    inner = {"windows": pa.int32()} if kind == "documents" else {"starts": pa.int32(), "labels": pa.int8()}
    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        "tokenizer_fingerprint": fingerprint,
        "vocab_size": str(vocab_size),
    }
    if kind == "documents":
        metadata |= {"num_anchors": str(geometry.num_anchors), "max_tokens": str(geometry.max_tokens)}
        if short_documents != "drop":  # without effect if short documents are dropped, and then left out
            metadata |= {"min_tokens": str(geometry.min_tokens), "short_documents": short_documents}
    else:
        metadata["content"] = kind
    lists = {name: pa.list_(inner_type) for name, inner_type in ({"tokens": token_type} | inner).items()}
    return _schema(lists | {"num_tokens": pa.int64()}, metadata)


MEDIA_COLUMNS: dict[MediaKind, dict[str, pa.DataType]] = {
    "images": {"image": pa.binary(), "width": pa.int32(), "height": pa.int32()},
    "audio": {"frames": pa.list_(pa.float32()), "num_frames": pa.int32()},
}  # columns of one kind alone, before `label`


def media_schema(kind: MediaKind) -> pa.Schema:
    """Schema of a shard of images or audio."""
    metadata = {"schema_version": str(SCHEMA_VERSION), "content": kind}
    return _schema(MEDIA_COLUMNS[kind] | {"label": pa.string()}, metadata)


def _schema(columns: dict[str, pa.DataType], metadata: dict[str, str]) -> pa.Schema:
    """A schema of these columns between those that every shard has."""
    columns = {"id": pa.binary(ID_BYTES)} | columns | {"source": pa.string(), "offset": pa.int64()}
    return pa.schema([pa.field(name, column, nullable=False) for name, column in columns.items()], metadata=metadata)


def geometry_of(schema: pa.Schema) -> tuple[Geometry, ShortDocuments]:
    """The geometry of a shard, and the treatment of short documents."""
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    geometry = Geometry.model_validate({key: metadata[key] for key in Geometry.model_fields if key in metadata})
    return geometry, cast(ShortDocuments, metadata.get("short_documents", "drop"))


class ShardWriter(ExitStack):
    """Writes the documents of a unit's split; the file appears if there are some and the block ends without error."""

    def __init__(self, folder: Path, unit: str, split: Split, schema: pa.Schema, record_batch_rows: int) -> None:
        super().__init__()
        self._path = folder / f"{split}-{unit}.arrow"
        self._split: Split = split
        self._schema, self._record_batch_rows = schema, record_batch_rows
        self._rows: list[tuple[bytes, Any, str, int, Layout | None]] = []
        self._held_tokens = self._block = self._num_documents = self._num_tokens = 0
        self._stream: Any = None

    def add(
        self,
        identity: bytes,
        content: NDArray[np.uint32] | Media,
        source: str,
        offset: int,
        layout: Layout | None = None,
    ) -> int:
        """Adds a row: its id, its `(num_tokens,)` token ids or its image or clip, and its source; returns its number.

        A row of short texts also has their layout. Collected rows are written when they fill a record batch.
        """
        if isinstance(content, Image | Clip):
            self._held_tokens += content.size
            self._block += content.num_bytes
        else:
            vocab_size = int(self._schema.metadata[b"vocab_size"])
            if len(content) and int(content.max()) >= vocab_size:  # no model has an embedding for it
                token = f"{source} at {offset}: token id {int(content.max())}"
                raise ShardError(f"{token} is beyond the vocabulary of {vocab_size} tokens")
            self._held_tokens += len(content)
            self._block += len(content)
        self._rows.append((identity, content, source, offset, layout))
        number = self._num_documents + len(self._rows) - 1
        if self._block >= _BLOCK or len(self._rows) >= self._record_batch_rows:
            self._flush()
        return number

    def _flush(self) -> None:
        """Writes the collected documents as one record batch."""
        if not self._rows:
            return
        if self._stream is None:
            aside = self.enter_context(atomic_file(self._path))  # a shard appears whole or not at all
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
        self._rows, self._held_tokens, self._block = [], 0, 0

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
        if kind is None:  # after an error nothing more is written, and the file beside is removed
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
