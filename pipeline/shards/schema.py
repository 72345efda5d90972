"""What is in a shard: an Arrow IPC file, one row a document, record batches of a bounded number of rows.

| column     | type                      | meaning                                                              |
|------------|---------------------------|----------------------------------------------------------------------|
| id         | fixed_size_binary(16)     | hash of the normalised text (docs/decisions/0002-document-id.md)      |
| tokens     | list<uint16> or <uint32>  | token ids without special tokens; uint16 where the vocabulary allows  |
| windows    | list<int32>               | starts of the windows that may hold an anchor, in tokens              |
| num_tokens | int64                     | length of `tokens`                                                   |
| source     | string                    | input file, relative to the input root it was found under, see below |
| offset     | int64                     | where the document starts in its source, see below                    |

`source` of a document inside an archive is the archive and the member joined with "!", as often as they lie in each
other: `openwebtext.tar.xz!openwebtext/urlsf_subset00-1_data.xz!0001-abc.txt`. A dataset of the Hub is named with its
commit: `owner/name@0123456789ab/train.parquet`.

`offset` is a byte in the innermost file, uncompressed, for JSONL and text: the one at which the line starts, or the
piece of a document that was cut because it is longer than `corpus.max_document_mib`. It is the row number in Parquet,
Arrow and CSV files, the same for all pieces of a row, and 0 for a Python module; for `pydoc_data.topics` it is the
ordinal of the topic.
"""

from typing import cast

import pyarrow as pa

from pipeline.shards.windows import Geometry, ShortDocuments

SCHEMA_VERSION = 1
ID_BYTES = 16
UINT16_VOCABULARY = 2**16


def shard_schema(
    vocab_size: int, geometry: Geometry, fingerprint: str, short_documents: ShortDocuments = "drop"
) -> pa.Schema:
    """Schema of a shard; its metadata names what the tokens and windows mean, so that a shard explains itself."""
    drop = short_documents == "drop"
    token_type = pa.uint16() if vocab_size <= UINT16_VOCABULARY else pa.uint32()
    return pa.schema(
        [
            pa.field("id", pa.binary(ID_BYTES), nullable=False),
            pa.field("tokens", pa.list_(token_type), nullable=False),
            pa.field("windows", pa.list_(pa.int32()), nullable=False),
            pa.field("num_tokens", pa.int64(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
        ],
        metadata={
            "schema_version": str(SCHEMA_VERSION),
            "tokenizer_fingerprint": fingerprint,
            "vocab_size": str(vocab_size),
            "num_anchors": str(geometry.num_anchors),
            "max_tokens": str(geometry.max_tokens),
        }
        # What plays no part where short documents are dropped is left out there.
        | ({} if drop else {"min_tokens": str(geometry.min_tokens), "short_documents": short_documents}),
    )


def geometry_of(schema: pa.Schema) -> tuple[Geometry, ShortDocuments]:
    """The geometry of a shard, and what became of short documents."""
    found = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    geometry = Geometry.model_validate({key: found[key] for key in Geometry.model_fields if key in found})
    return geometry, cast(ShortDocuments, found.get("short_documents", "drop"))
