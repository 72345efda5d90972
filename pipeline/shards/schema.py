"""Schema of a shard: an Arrow IPC file with one row a document, in record batches of bounded size.

Rows of documents have these columns:

| column     | type                      | meaning                                                              |
|------------|---------------------------|----------------------------------------------------------------------|
| id         | fixed_size_binary(16)     | hash of the normalised text (docs/decisions/0002-document-id.md)      |
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

from typing import cast

import pyarrow as pa

from declutr.pipeline.readers.corpus import ID_BYTES
from declutr.pipeline.shards.content import MediaKind, TextKind
from declutr.pipeline.shards.windows import Geometry, ShortDocuments

SCHEMA_VERSION = 1
UINT16_VOCABULARY = 2**16


def shard_schema(
    vocab_size: int,
    geometry: Geometry,
    fingerprint: str,
    short_documents: ShortDocuments = "drop",
    kind: TextKind = "documents",
) -> pa.Schema:
    """Schema of a shard of texts; its metadata names the tokenizer and the geometry of the tokens and windows."""
    token_type = pa.uint16() if vocab_size <= UINT16_VOCABULARY else pa.uint32()
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
    return pa.schema(
        [
            pa.field("id", pa.binary(ID_BYTES), nullable=False),
            pa.field("tokens", pa.list_(token_type), nullable=False),
            *(pa.field(name, pa.list_(inner_type), nullable=False) for name, inner_type in inner.items()),
            pa.field("num_tokens", pa.int64(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
        ],
        metadata=metadata,
    )


MEDIA_COLUMNS: dict[MediaKind, dict[str, pa.DataType]] = {
    "images": {"image": pa.binary(), "width": pa.int32(), "height": pa.int32()},
    "audio": {"frames": pa.list_(pa.float32()), "num_frames": pa.int32()},
}
"""Columns of one kind alone, before `label`."""


def media_schema(kind: MediaKind) -> pa.Schema:
    """Schema of a shard of images or audio."""
    columns = {
        "id": pa.binary(ID_BYTES),
        **MEDIA_COLUMNS[kind],
        "label": pa.string(),
        "source": pa.string(),
        "offset": pa.int64(),
    }
    return pa.schema(
        [pa.field(name, column, nullable=False) for name, column in columns.items()],
        metadata={"schema_version": str(SCHEMA_VERSION), "content": kind},
    )


def geometry_of(schema: pa.Schema) -> tuple[Geometry, ShortDocuments]:
    """The geometry of a shard, and the treatment of short documents."""
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    geometry = Geometry.model_validate({key: metadata[key] for key in Geometry.model_fields if key in metadata})
    return geometry, cast(ShortDocuments, metadata.get("short_documents", "drop"))
