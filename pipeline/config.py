"""Configuration of `prepare`, composed of sections that are defined next to the code they configure."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from declutr.common.cluster import SessionConfig
from declutr.common.config import Strict
from declutr.common.errors import UsageError, missing_extra, refusal
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem
from declutr.common.storage import hash_json
from declutr.common.stores.address import bucket_problem, is_remote
from declutr.common.stores.folder import Folder
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.config import problems as duplicates_problems
from declutr.pipeline.filters.document_filter import FiltersConfig
from declutr.pipeline.readers.corpus import FIELD_FORMATS, UNIT_MIB, FilesCorpus, HubCorpus
from declutr.pipeline.readers.pydocs import PythonDocs
from declutr.pipeline.shards.content import MEDIA_KINDS, AnyContent, DocumentsContent, MediaContent, keys_of
from declutr.pipeline.shards.manifest import MANIFEST
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.pipeline.tokenizer.tokenization import TokenizerConfig

_LOOK_SECONDS = 20.0  # time for a store to answer before any work; it is not known yet whether the address is right
# Files of an output, for patterns that match some of them.
_WRITTEN = ["plan.json", "progress.jsonl", "train-00000.arrow", "held-out-00000.arrow", "tokenizer/tokenizer.json"]
_WRITTEN += ["ledger/00000.arrow", "rejected/00000.jsonl.gz", "units/00000.json", "candidates/train-00000.arrow"]
_WRITTEN += ["candidates/keys/00000.arrow", "candidates/rejected/00000.jsonl.gz", "candidates/units/00000.json"]
# Rules of `filters` that count words and lines of a page.
_DOCUMENT_RULES = ("boilerplate", "c4", "gopher", "repetition")
# Settings that decide where and how the work runs, but not its result.
_NO_INFLUENCE: dict[str, Any] = {
    **dict.fromkeys(("output", "session", "max_error_rate", "cache", "storage_retry_seconds"), True),
    "tokenizer": {"engine"},
}


class PipelineConfig(Strict):
    """From a corpus to shards."""

    output: str
    """Folder of the shards for all hosts, or an address (`s3://...`, `gs://...`)."""
    corpus: Annotated[FilesCorpus | HubCorpus | PythonDocs, Field(discriminator="kind")]
    content: AnyContent = DocumentsContent()
    tokenizer: TokenizerConfig | None = Field(default=None, validate_default=True)
    """Tokenizer of texts; images and audio need none."""
    geometry: Geometry = Geometry()
    short_documents: ShortDocuments = "drop"
    """Documents under 2 * num_anchors * max_tokens tokens. drop: drop them. fewer_anchors: as many anchors as fit.
    shrink_spans: shorter spans, down to geometry.min_tokens."""
    filters: FiltersConfig = FiltersConfig()
    """Cleaning, language, quality, evaluation sets (docs/reference/filters.md)."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    """Copies of documents to remove."""
    write_rejected: bool = False
    """Write documents that are not kept, with the reason."""
    max_error_rate: float = Field(default=0.01, ge=0, le=1)
    """Share of documents that may be unreadable; above it `prepare` fails."""
    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of documents held out for validation."""
    unit_mib: float | None = Field(default=None, gt=0)
    """Text of one task, MiB; a kill loses at most this. null: 32, or more above 65,536 units."""
    record_batch_rows: int = Field(default=1000, ge=1)
    """Rows of an Arrow record batch, read at once."""
    seed: int = Field(default=0, ge=0)
    """Seed of the held-out split."""
    cache: str = "~/.cache/declutr"
    """Folder for files on their way to an address."""
    storage_retry_seconds: float = Field(default=600.0, ge=0)
    """Seconds to retry while the store does not answer."""
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
        kind = self.content.kind
        problems = [
            *duplicates_problems(self.duplicates),
            *(f"{key}: has no effect with content.kind = {kind}, {why}; remove it" for key, why in self._unused()),
            *self._missing(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _unused(self) -> Iterator[tuple[str, str]]:
        """Settings without effect on this kind of content, with the reason."""
        kind, corpus = self.content.kind, self.corpus
        if kind == "documents":
            return
        for name, default in (("geometry", Geometry()), ("short_documents", "drop")):
            if getattr(self, name) != default:
                yield name, "whose rows have no windows"
        media, rules = kind in MEDIA_KINDS, FiltersConfig()
        for name in FiltersConfig.model_fields:
            if getattr(self.filters, name) != getattr(rules, name) and media:
                yield f"filters.{name}", "which has no texts"
            elif name in _DOCUMENT_RULES and getattr(self.filters, name) is not None and keys_of(self.content):
                yield f"filters.{name}", "whose texts are short: its rules are for long documents"
        if media and self.tokenizer is not None:
            yield "tokenizer", "whose rows have no text"
        if media and self.duplicates.near is not None:
            yield "duplicates.near", "which has no words to compare (exact works)"
        if media and isinstance(corpus, FilesCorpus) and not corpus.format.startswith("auto"):
            yield f"corpus.format = {corpus.format}", "whose files are known by their endings"

    def _missing(self) -> Iterator[str]:
        """Settings that this kind of content needs and lacks, one line each."""
        kind, content, corpus, keys = self.content.kind, self.content, self.corpus, keys_of(self.content)
        if isinstance(content, MediaContent):
            yield from filter(None, [missing_extra(kind, f"content.kind = {kind}")])
            if content.max_labels is not None and content.label is None:
                yield "content.max_labels: content.label = null gives no labels; set it, or remove max_labels"
            if content.max_labels is not None and not self.duplicates.enabled:
                yield (
                    "content.max_labels: counts the labels of all rows before the shards are written, as the search "
                    "for duplicates does; set duplicates.exact=true"
                )
        elif not keys:
            return
        if isinstance(corpus, PythonDocs):
            yield f"corpus.kind = python_docs: has no {kind}; name files or a dataset of the hub"
            return
        if corpus.text_field != "text":
            column = f"content.{'image' if kind == 'images' else 'audio'} for Parquet"
            yield f"corpus.text_field: has no effect with content.kind = {kind}; set {', '.join(keys) or column}"
        if keys and isinstance(corpus, FilesCorpus) and corpus.format not in ("auto", "auto_text_file", *FIELD_FORMATS):
            formats = ", ".join(FIELD_FORMATS)
            yield f"corpus.format = {corpus.format}: has no columns; content.kind = {kind} is read from {formats}"
        if len(set(keys.values())) < len(keys):
            yield f"{', '.join(keys)}: two of them name the same key, {' '.join(keys.values())}; give each another one"


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


def differing_keys(settings: dict[str, Any], other: dict[str, Any], section: str = "") -> list[str]:
    """Lines `key: here <value>, there <value>` for settings that differ between our `identity` and another one."""
    lines = list[str]()
    for key in sorted(settings.keys() | other.keys()):
        here, there = settings.get(key, "(not set)"), other.get(key, "(not set)")
        if isinstance(here, dict) and isinstance(there, dict):
            lines += differing_keys(here, there, f"{section}{key}.")
        elif here != there:
            lines.append(f"{section}{key}: here {here!r}, there {there!r}")
    return lines


def look(values: Mapping[str, Any]) -> list[str]:
    """Problems of `output`, `corpus.paths` and `tokenizer.name`, one line each."""
    corpus, tokenizer = values.get("corpus"), values.get("tokenizer")
    paths = corpus.get("paths") if isinstance(corpus, Mapping) else None
    listed = paths if isinstance(paths, list) else []  # other types are reported by the validation of the setting
    inputs = [path for path in listed if isinstance(path, str)]
    problems = [
        f"corpus.paths: {problem}" for path in inputs if not is_remote(path) and (problem := _path_problem(path))
    ]
    output = values.get("output")
    if isinstance(output, str):
        setting = values.get("storage_retry_seconds", _LOOK_SECONDS)
        seconds = min(setting, _LOOK_SECONDS) if isinstance(setting, int | float) else _LOOK_SECONDS
        excludes = isinstance(corpus, Mapping) and bool(corpus.get("exclude"))
        places = output_place_problems(output, inputs, seconds, excludes)
        problems += [f"output = {output!r}: {problem}" for problem in places]
    name = tokenizer.get("name") if isinstance(tokenizer, Mapping) else None
    if isinstance(name, str) and looks_like_a_path(name):
        problem = _path_problem(name)
        if problem is None and not expand(name).is_dir():
            problem = f"no such folder; looked at {expand(name).absolute()}"
        problems += [f"tokenizer.name = {name!r}: {problem}"] if problem else []
    return problems


def output_place_problems(
    output: str,  # a folder or an address
    inputs: Sequence[str],  # paths and addresses of the corpus
    storage_retry_seconds: float = _LOOK_SECONDS,  # time to retry a request while a store does not answer
    excludes: bool = False,  # the corpus leaves files out, so that a pattern need not meet what is written
) -> list[str]:
    """Reasons why an output cannot take the shards: it cannot be written to, or is inside an input."""
    if problem := refusal(output) or (bucket_problem if is_remote(output) else _path_problem)(output):
        return [problem]
    finished = not is_remote(output) and (expand(output) / MANIFEST).is_file()  # nothing is written then
    problems = found_again(output, inputs, [] if excludes or finished else _WRITTEN)
    if not is_remote(output):  # to a finished output a read-only disk is enough
        return [*problems, *filter(None, [None if finished else folder_problem(expand(output))])]
    if not _place(output).partition("://")[2].partition("/")[2]:
        problems.append("names no folder in the bucket; add one, like s3://BUCKET/openwebtext")
    if problems:
        return problems
    remote, probe = Folder(output, storage_retry_seconds), f".declutr-{secrets.token_hex(4)}"
    try:
        if not remote.is_whole():  # nothing is written to a complete output, so reading it is enough
            remote.put(probe, b"")
            remote.delete(probe)
    except (OSError, NotImplementedError) as error:
        return [f"nothing can be written there: {error}"]
    return []


def found_again(output: str, inputs: Sequence[str], written: Sequence[str]) -> list[str]:
    """A problem for each input that holds an output, or whose pattern finds a file that is written there."""
    if not is_remote(output) and _path_problem(output):
        return []  # which is said elsewhere
    here, kind = _place(output), "address" if is_remote(output) else "folder"
    return [
        f"is inside the input {path!r}, so a later command would read it as input; name another {kind}"
        for path in inputs
        if is_remote(path) == is_remote(output) and (is_remote(path) or not _path_problem(path))
        if here.startswith(place := _place(path))
        or ((is_remote(path) or not os.path.lexists(place[:-1])) and any(_matches(place, here + n) for n in written))
    ]


def _place(path: str) -> str:
    """A folder without links or an address without options, with one slash at its end."""
    # a link may lead into an input
    place = path.partition("?")[0] if is_remote(path) else os.path.realpath(expand(path))
    return f"{place.rstrip('/')}/"


def _matches(pattern: str, path: str) -> bool:
    """Returns True if a search for inputs by a pattern, with a slash at its end, would find a path."""
    part, _, later = pattern.partition("/")
    name, _, below = path.partition("/")
    if not pattern or not path:
        return not path and pattern in ("", "**/")
    if part == "**":
        return _matches(later, path) or (name[0:1] != "." and _matches(pattern, below))
    return (name[0:1] != "." or name == part) and fnmatchcase(name, part) and _matches(later, below)


def _path_problem(path: str) -> str | None:
    try:
        expand(path)
    except UsageError as error:
        return str(error)
    return None
