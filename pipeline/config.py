"""Configuration of `prepare`: composes the branches that sit beside the code they configure."""

from typing import Annotated, Any

from pydantic import Field

from common.config import Strict, flat_keys
from common.session_config import SessionConfig
from common.storage import hash_json
from pipeline.choosing.config import ChoosingConfig
from pipeline.duplicates.config import DuplicatesConfig
from pipeline.readers.corpus import FilesCorpus, HubCorpus
from pipeline.readers.pydocs import PythonDocs
from pipeline.shards.windows import Geometry, ShortDocuments
from pipeline.tokenizer.tokenization import TokenizerConfig

# Settings that say where and how the work runs, not what it makes.
_NO_INFLUENCE: dict[str, Any] = {"output": True, "session": True, "max_error_share": True, "tokenizer": {"engine"}}


class PipelineConfig(Strict):
    """From a corpus to shards: the `prepare` section of a config file."""

    output: str
    """Folder of the shards; made when missing."""
    corpus: Annotated[FilesCorpus | HubCorpus | PythonDocs, Field(discriminator="kind")]
    tokenizer: TokenizerConfig
    geometry: Geometry = Geometry()
    short_documents: ShortDocuments = "drop"
    """What becomes of documents under 2 * num_anchors * max_tokens tokens. drop: as in the paper. fewer_anchors: they
    give as many anchors as fit. shrink_spans: they give all anchors, with spans of at most 1 / (2 * num_anchors) of the
    document, down to geometry.min_tokens."""
    choosing: ChoosingConfig = ChoosingConfig()
    """Cleaning, language, quality, evaluation sets."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """Which copies of documents are removed."""
    write_rejected: bool = False
    """Also write every document that is not kept, with the reason, to `rejected/`."""
    max_error_share: float = Field(default=0.01, ge=0, le=1)
    """Share of the documents that may fail to be read; above it the work is not called finished."""
    held_out_share: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents kept from training, chosen by document id."""
    unit_mib: float = Field(default=32.0, gt=0)
    """Text that one task reads, MiB: what each worker loses at most when a run is killed. A .gz file is never cut."""
    block_documents: int = Field(default=1000, ge=1)
    """Rows of a record batch in a shard: what a task of the trainer reads at once."""
    seed: int = Field(default=0, ge=0)
    """Of the held-out split."""
    session: SessionConfig = SessionConfig()


def identity(config: PipelineConfig) -> dict[str, Any]:
    """The settings that decide what the shards hold, as JSON."""
    return config.model_dump(mode="json", exclude=_NO_INFLUENCE)


def config_hash(config: PipelineConfig) -> str:
    """SHA-256 of `identity`: runs with equal hashes over equal inputs write equal bytes."""
    return hash_json(identity(config))


def differing_keys(config: PipelineConfig, other: dict[str, Any]) -> list[str]:
    """Lines `key: here <value>, there <value>` for the settings in which an `identity` differs from this config's."""
    mine, theirs = flat_keys(identity(config)), flat_keys(other)
    return [
        f"{key}: here {mine.get(key, '(not set)')!r}, there {theirs.get(key, '(not set)')!r}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key, "(not set)") != theirs.get(key, "(not set)")
    ]
