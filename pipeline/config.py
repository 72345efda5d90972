"""Configuration of `prepare`, composed of sections that are defined next to the code they configure."""

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from declutr.common.cluster import SessionConfig
from declutr.common.config import Strict, flat_keys
from declutr.common.errors import missing_extra
from declutr.common.storage import hash_json
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.filters.document_filter import FiltersConfig
from declutr.pipeline.readers.corpus import FIELD_FORMATS, UNIT_MIB, FilesCorpus, HubCorpus
from declutr.pipeline.readers.pydocs import PythonDocs
from declutr.pipeline.shards.content import MEDIA_KINDS, AnyContent, DocumentsContent, keys_of
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.pipeline.tokenizer.tokenization import TokenizerConfig

_DOCUMENT_RULES = ("boilerplate", "c4", "gopher", "repetition")
"""Rules of `filters` that count words and lines of a page."""
# Settings that decide where and how the work runs, but not its result.
_NO_INFLUENCE: dict[str, Any] = {
    **dict.fromkeys(("output", "session", "max_error_rate", "cache", "storage_retry_seconds"), True),
    "tokenizer": {"engine"},
}


class PipelineConfig(Strict):
    """From a corpus to shards."""

    output: str
    """Folder of the shards, created if missing, which all hosts must see, or an address (`s3://...`, `gs://...`)."""
    corpus: Annotated[FilesCorpus | HubCorpus | PythonDocs, Field(discriminator="kind")]
    content: AnyContent = DocumentsContent()
    tokenizer: TokenizerConfig | None = Field(default=None, validate_default=True)
    """Tokenizer of texts; images and audio need none."""
    geometry: Geometry = Geometry()
    short_documents: ShortDocuments = "drop"
    """Documents under 2 * num_anchors * max_tokens tokens. drop: drop them, as in the paper. fewer_anchors: take as
    many anchors as fit. shrink_spans: take all anchors, with spans of at most 1 / (2 * num_anchors) of the document,
    down to geometry.min_tokens."""
    filters: FiltersConfig = FiltersConfig()
    """Cleaning, language, quality, evaluation sets; docs/reference/filters.md has the reasons of drops."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """Copies of documents to remove."""
    write_rejected: bool = False
    """Also write documents that are not kept to `rejected/`, with the reason."""
    max_error_rate: float = Field(default=0.01, ge=0, le=1)
    """Largest fraction of documents that may fail to be read; above it `prepare` ends with an error."""
    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Fraction of documents held out for validation, chosen by id."""
    unit_mib: float | None = Field(default=None, gt=0)
    """Text of one task, MiB; a killed run loses at most this much a worker. A .gz file is never cut. null: 32, or more
    if there were over 65,536 units (2 TiB)."""
    record_batch_rows: int = Field(default=1000, ge=1)
    """Rows of an Arrow record batch, which a task of the trainer loads at once."""
    seed: int = Field(default=0, ge=0)
    """Seed of the held-out split."""
    cache: str = "~/.cache/declutr"
    """Folder on each host for files on their way to an address."""
    storage_retry_seconds: float = Field(default=600.0, ge=0)
    """Time to retry a request while the store does not answer."""
    session: SessionConfig = SessionConfig()

    @field_validator("tokenizer")
    @classmethod
    def _needs_tokenizer(cls, tokenizer: TokenizerConfig | None, info: ValidationInfo) -> TokenizerConfig | None:
        """Requires a tokenizer for kinds of content with text."""
        if tokenizer is None and "content" in info.data and info.data["content"].kind not in MEDIA_KINDS:
            raise PydanticKnownError("missing")
        return tokenizer

    @model_validator(mode="after")
    def _check_content(self) -> "PipelineConfig":
        """Refuses settings that have no effect on this content, or no sense."""
        if problems := _content_problems(self):
            raise ValueError("\n".join(problems))
        return self


def _content_problems(config: PipelineConfig) -> list[str]:
    """Settings that do not fit the kind of rows, one line each."""
    content, kind, corpus = config.content, config.content.kind, config.corpus
    if kind == "documents":
        return []
    media, keys = kind in MEDIA_KINDS, keys_of(content)
    problems = [
        f"{name}: has no effect with content.kind = {kind}, whose rows have no windows; remove it"
        for name, default in (("geometry", Geometry()), ("short_documents", "drop"))
        if getattr(config, name) != default
    ]
    if media:
        problems += _media_problems(config)
    elif not keys:
        return problems
    problems += [
        f"filters.{name}: its rules are for long documents; content.kind = {kind} has short texts; remove it"
        for name in (() if media else _DOCUMENT_RULES)
        if getattr(config.filters, name) is not None
    ]
    if isinstance(corpus, PythonDocs):
        return [*problems, f"corpus.kind = python_docs: has no {kind}; name files or a dataset of the hub"]
    settings = ", ".join(keys)
    if corpus.text_field != "text":
        remedy = f"content.{'image' if kind == 'images' else 'audio'} for Parquet" if media else settings
        problems.append(f"corpus.text_field: has no effect with content.kind = {kind}; set {remedy}")
    chosen = corpus.format if isinstance(corpus, FilesCorpus) else "auto"
    if media and chosen != "auto":
        problems.append(
            f"corpus.format = {chosen}: has no effect with content.kind = {kind}, whose files are known by their "
            "endings; remove it"
        )
    if not media and chosen not in ("auto", *FIELD_FORMATS):
        problems.append(
            f"corpus.format = {chosen}: has no columns; content.kind = {kind} is read from {', '.join(FIELD_FORMATS)}"
        )
    if not media and len(set(keys.values())) < len(keys):
        problems.append(f"{settings}: two of them name the same key, {' '.join(keys.values())}; give each another one")
    return problems


def _media_problems(config: PipelineConfig) -> list[str]:
    """Settings for texts that were given for images or audio, one line each."""
    kind = config.content.kind
    problems = list(filter(None, [missing_extra(kind, f"content.kind = {kind}")]))
    if getattr(config.content, "max_labels", None) is not None:
        if getattr(config.content, "label", None) is None:
            problems.append("content.max_labels: content.label = null gives no labels; set it, or remove max_labels")
        if not config.duplicates.enabled:
            problems.append(
                "content.max_labels: counts the labels of all rows before the shards are written, as the search for "
                "duplicates does; set duplicates.exact=true"
            )
    if config.tokenizer is not None:
        problems.append(f"tokenizer: has no effect with content.kind = {kind}, whose rows have no text; remove it")
    problems += [
        f"filters.{name}: is for texts; content.kind = {kind} has none; remove it"
        for name in FiltersConfig.model_fields
        if getattr(config.filters, name) != getattr(FiltersConfig(), name)
    ]
    if config.duplicates.near is not None:
        problems.append(f"duplicates.near: compares words; content.kind = {kind} has none; remove it (exact works)")
    return problems


def identity(config: PipelineConfig) -> dict[str, Any]:
    """The settings that decide the content of the shards, as JSON. Those without effect on its kind are left out."""
    settings = config.model_dump(mode="json", exclude=_NO_INFLUENCE)
    settings["unit_mib"] = settings["unit_mib"] or UNIT_MIB
    if config.content.kind != "documents":
        del settings["geometry"], settings["short_documents"]
    if config.content.kind in MEDIA_KINDS:
        del settings["tokenizer"], settings["filters"]
    return settings


def config_hash(config: PipelineConfig) -> str:
    """SHA-256 of `identity`: runs with equal hashes over equal inputs write equal bytes."""
    return hash_json(identity(config))


def differing_keys(config: PipelineConfig, other: dict[str, Any]) -> list[str]:
    """Lines `key: here <value>, there <value>` for settings that differ between this config and an `identity`."""
    here, there = flat_keys(identity(config)), flat_keys(other)
    return [
        f"{key}: here {here.get(key, '(not set)')!r}, there {there.get(key, '(not set)')!r}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key, "(not set)") != there.get(key, "(not set)")
    ]
