"""The index of prepared shards: the few manifest fields that a reader of documents needs."""

from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
from pydantic import ValidationError

from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.integrity import content_problem
from declutr.pipeline.shards.manifest import MANIFEST, ShardError, load_manifest
from declutr.pipeline.shards.media import media_problem
from declutr.pipeline.shards.schema import SCHEMA_VERSION
from declutr.pipeline.shards.windows import Geometry, ShortDocuments


class ListedShard(msgspec.Struct, frozen=True):
    """The fields of a shard's manifest entry that are needed to find documents."""

    name: str
    split: Literal["train", "held-out"]
    num_documents: int
    num_bytes: int


class _Tokenizer(msgspec.Struct, frozen=True):
    vocab_size: int


class _Content(msgspec.Struct, frozen=True):
    kind: ContentKind = "documents"
    num_mel_bins: int = 0


class _Settings(msgspec.Struct, frozen=True):
    short_documents: ShortDocuments = "drop"
    content: _Content = _Content()


class ManifestIndex(msgspec.Struct, frozen=True):
    """The part of a manifest that a reader needs; at 100,000 shards it takes a tenth of the whole's time and memory."""

    schema_version: int
    shards: list[ListedShard]
    geometry: dict[str, int]
    tokenizer: _Tokenizer | None
    config: _Settings

    def problem(self, rows: pa.RecordBatch) -> tuple[int, str] | None:
        """Like `content_problem`, with this manifest's geometry and vocabulary."""
        kind = self.kind
        if kind == "images" or kind == "audio":
            return media_problem(rows, kind, self.config.content.num_mel_bins)
        geometry = Geometry.model_validate(self.geometry)
        vocab_size = self.tokenizer.vocab_size if self.tokenizer else 0
        return content_problem(rows, geometry, self.config.short_documents, vocab_size, kind)

    @property
    def kind(self) -> ContentKind:
        """Kind of the rows."""
        return self.config.content.kind


def load_index(folder: Path) -> ManifestIndex:
    """Reads the index of a manifest; if that fails, reads the whole manifest for a detailed error message.

    Raises:
        ShardError: see `load_manifest`.
    """
    try:
        index = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=ManifestIndex)
        Geometry.model_validate(index.geometry)
    except (OSError, msgspec.DecodeError, ValidationError):
        index = None
    if index is not None and index.schema_version == SCHEMA_VERSION:
        return index
    manifest = load_manifest(folder)
    try:
        return msgspec.json.decode(manifest.model_dump_json(), type=ManifestIndex)
    except msgspec.DecodeError as error:
        raise ShardError(f"{folder / MANIFEST} is not a manifest of this version: {error}") from error
