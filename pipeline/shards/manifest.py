"""The manifest of prepared shards: files, counts of documents, and configuration."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from declutr.common.config import Strict, describe
from declutr.common.errors import ShardError as ShardError
from declutr.common.storage import hash_json
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.readers.input_state import InputState
from declutr.pipeline.readers.skipped import Skip
from declutr.pipeline.shards.content import MEDIA_KINDS, AnyContent, noun_of
from declutr.pipeline.shards.ledger import Counts as Counts
from declutr.pipeline.shards.ledger import LedgerFile, Losses, sum_losses
from declutr.pipeline.shards.ledger import sum_counts as sum_counts
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
# Files of other folders that a user may confuse with shards.
_OTHERS = {
    "checkpoints": "a run (its config.yaml names its shards)",
    "scores": "an adaptation (its shards are in data)",
    "state.json": "a checkpoint",
    "modules.json": "an encoder",
    "index.json": "an index",
}
TOKENIZER = "tokenizer"  # folder of the tokenizer in the output folder
MAX_EXAMPLES = 100  # failures listed in a manifest and in each sidecar; all failures are counted

MAX_LABELS = 1_000_000  # most different labels of images or clips

_CONTENT: TypeAdapter[AnyContent] = TypeAdapter(AnyContent)

# Packages that decide the rows of images and audio.
_LIBRARIES = {"images": ("numpy", "pillow"), "audio": ("numpy", "scipy", "soundfile", "transformers")}

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = ("train", "held-out")


# Slots instead of a dictionary a shard: every reader holds the manifest, and 65,536 units take an eighth of the memory.
@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Shard:
    """One Arrow file of the output folder."""

    name: str
    split: Split
    num_documents: int
    num_tokens: int
    num_bytes: int
    sha256: str


class ListedShard(msgspec.Struct, frozen=True):
    """The fields of a shard's entry that are needed to find documents."""

    name: str
    split: Split
    num_documents: int
    num_bytes: int


class Sidecar(Strict):
    """Result of one unit, written after its shards: the unit is finished if this file exists."""

    unit: str
    unit_hash: str
    config_hash: str
    num_bytes: int  # input bytes of the unit
    counts: Counts
    losses: Losses = Losses()
    failures: list[ReadFailure]
    shards: list[Shard]
    ledger: LedgerFile
    input_state: InputState | None = None  # state of the inputs when they were read; None if the plan has none
    conflict: str | None = None  # an example of a copy whose label differs from that of the kept row
    # SHA-256 and size of its other files, of keys and rejected documents, by name; None before 0.3.
    others: dict[str, tuple[str, int]] | None = None


class Manifest(Strict):
    """Content of an output folder."""

    schema_version: int
    shards: list[Shard]
    ledgers: list[LedgerFile]  # files with the status of each document: one a unit, in plan order
    # Counts of documents: read, kept, kept to train, kept as held-out, dropped, failed, lost with files that break
    # off. Tokens and unknown tokens of the kept ones, tokens of the longest one; bytes of input and of text.
    totals: dict[str, int]
    dropped: dict[str, int]  # dropped documents by reason
    failed: dict[str, int]  # failed documents by reason
    failures: list[ReadFailure]  # examples, in corpus order; all failures are counted in `failed`
    tokenizer: TokenizerInfo | None  # None for images and audio
    geometry: Geometry
    config: dict[str, Any]  # Resolved settings that decide the content of the shards
    config_hash: str
    versions: dict[str, str]
    skipped: dict[str, Skip] = Field(default_factory=dict)  # files that a search of folders skipped, by kind
    # Kept hypotheses of pairs and triples, or images or clips, by label.
    labels: dict[str, int] = Field(default_factory=dict)
    notes: dict[str, int] = Field(default_factory=dict)  # kept images or clips by what was changed
    conflict: str | None = None  # an example of a copy whose label differs from that of the kept row

    @property
    def text_tokenizer(self) -> TokenizerInfo:
        """The tokenizer of rows of text."""
        if self.tokenizer is None:
            raise ShardError(f"these shards hold {self.content.kind}, which have no tokenizer; name shards of texts")
        return self.tokenizer

    @property
    def short_documents(self) -> ShortDocuments:
        """Treatment of documents too short for `geometry`."""
        return self.config.get("short_documents", "drop")

    @property
    def content(self) -> AnyContent:
        """Kind of the rows."""
        return _CONTENT.validate_python(self.config.get("content", "documents"))

    @property
    def noun(self) -> str:
        """Noun for its rows in messages."""
        return noun_of(self.content.kind)


def examples_of(sidecars: Sequence[Sidecar]) -> list[ReadFailure]:
    """At most MAX_EXAMPLES failures: the first of each file and reason, then the second ones, and so on."""
    failures = [failure for sidecar in sidecars for failure in sidecar.failures]
    seen, ranks = Counter[tuple[str, str]](), list[int]()
    for failure in failures:
        seen[failure.source, failure.reason] += 1
        ranks.append(seen[failure.source, failure.reason])
    return [failures[number] for number in sorted(range(len(failures)), key=ranks.__getitem__)[:MAX_EXAMPLES]]


def build_manifest(
    sidecars: list[Sidecar],
    tokenizer: TokenizerInfo | None,
    geometry: Geometry,
    config: dict[str, Any],
    config_hash: str,
    skipped: dict[str, Skip] | None = None,
) -> Manifest:
    """Builds the manifest from the sidecars of all units, given in plan order."""
    kind = _CONTENT.validate_python(config.get("content", "documents")).kind
    counts = sum_counts([sidecar.counts for sidecar in sidecars])
    shards = [shard for split in SPLITS for sidecar in sidecars for shard in sidecar.shards if shard.split == split]
    counts.check("manifest")  # sums can balance although a ledger or a shard lacks rows; those are checked below
    kept = {split: sum(shard.num_documents for shard in shards if shard.split == split) for split in SPLITS}
    if (rows := sum(sidecar.ledger.num_rows for sidecar in sidecars)) != counts.read:
        raise ShardError(f"manifest: {counts.read} documents read, but {rows} in the ledgers")
    if len(counts.labels) > MAX_LABELS:
        raise ShardError(
            f"content.label = {config['content'].get('label')!r}: {len(counts.labels):,} different labels, at most "
            f"{MAX_LABELS:,} are possible; choose an expression that groups files, or null"
        )
    if sum(kept.values()) != counts.kept:
        raise ShardError(f"manifest: {counts.kept} documents kept, but {sum(kept.values())} in the shards")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        shards=shards,
        ledgers=[sidecar.ledger for sidecar in sidecars],
        totals={
            "read": counts.read,
            "kept": counts.kept,
            "dropped": sum(counts.dropped.values()),
            "failed": sum(counts.failed.values()),
            "kept_train": kept["train"],
            "kept_held_out": kept["held-out"],
            "num_tokens": sum(shard.num_tokens for shard in shards),
            "num_bytes": sum(sidecar.num_bytes for sidecar in sidecars),
            "text_bytes": counts.text_bytes,
            "longest_tokens": counts.longest_tokens,
            "unknown_tokens": counts.unknown_tokens,
            "lost": sum_losses(sidecar.losses for sidecar in sidecars).documents(),
        },
        dropped=counts.dropped,
        failed=counts.failed,
        failures=examples_of(sidecars),
        tokenizer=tokenizer,
        geometry=geometry,
        config=config,
        config_hash=config_hash,
        # Another version of one of these packages can change the bytes of shards.
        versions={name: version(name) for name in ("pyarrow", "ray", *_LIBRARIES.get(kind, ("tokenizers",)))},
        skipped=skipped or {},
        labels=counts.labels,
        notes=counts.notes,
        conflict=next((sidecar.conflict for sidecar in sidecars if sidecar.conflict), None),
    )


def load_manifest(folder: Path) -> Manifest:
    """Reads the manifest of prepared shards."""
    path = folder / MANIFEST
    if not folder.exists():
        raise ShardError(f"{folder}: no such folder; run `prepare` with this output")
    if folder.is_file():
        raise ShardError(f"{folder} is a file, not the output of `prepare`; name the folder of the shards")
    if not path.is_file():
        for place, what in _OTHERS.items():
            if (folder / place).exists():
                raise ShardError(f"{folder} is {what}, not the output of `prepare`; name the folder of the shards")
        end = "not finished; run `prepare` with this output" if (folder / "plan.json").is_file() else (
            "no whole output of `prepare`; prepare the texts into another folder, and name that")  # fmt: skip
        raise ShardError(f"{folder} holds no {MANIFEST}: {end}")
    return _checked(path, path.read_bytes())


def load_index(folder: Path) -> tuple[Manifest, list[ListedShard]]:
    """A manifest without its long lists and labels, and its shards: a sixth of the time and memory at 65,536 units."""
    path = folder / MANIFEST
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        shards = msgspec.json.decode(fields["shards"], type=list[ListedShard])
    except (OSError, KeyError, msgspec.DecodeError) as error:
        load_manifest(folder)  # its errors name the field
        raise ShardError(f"{path} is not a manifest of this version: {error}") from error
    return _checked(path, msgspec.json.encode(fields | {"shards": [], "ledgers": [], "labels": {}})), shards


def _checked(path: Path, raw: bytes) -> Manifest:
    """The manifest in the content of a file, with its version, content and tokenizer checked."""
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        problem = f"{describe(error, Manifest)[0]}; restore it, or prepare to another folder"
        raise ShardError(f"{path} is not a manifest of this version: {problem}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ShardError(f"{path} has schema version {manifest.schema_version}; this code reads {SCHEMA_VERSION}")
    try:
        kind = _CONTENT.validate_python(manifest.config.get("content", "documents")).kind
    except ValidationError as error:
        raise ShardError(f"{path}: content is not of this version: {describe(error, Manifest)[0]}") from error
    if (manifest.tokenizer is None) != (kind in MEDIA_KINDS):
        raise ShardError(
            f"{path} names {'no' if manifest.tokenizer is None else 'a'} tokenizer, but its rows are {kind}"
        )
    return manifest


def data_hash(manifest: Manifest) -> str:
    """Identity of prepared data: a hash of all shards' checksums, the tokenizer and the geometry."""
    return hash_json(
        [
            [[shard.name, shard.sha256] for shard in manifest.shards],
            manifest.tokenizer.fingerprint if manifest.tokenizer else None,
            manifest.geometry.model_dump(mode="json"),
        ]
    )


def joined_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of several corpora that are read as one: all shards, and the sums of their counts.

    Tokenizer, geometry and settings are those of the first; the checks of a run refuse corpora of others.
    """
    if len(manifests) == 1:
        return manifests[0]
    first = manifests[0]
    # A manifest made before 0.2 lacks some totals.
    totals = {key: sum(manifest.totals.get(key, 0) for manifest in manifests) for key in first.totals}
    counts = {
        name: [getattr(manifest, name) for manifest in manifests] for name in ("dropped", "failed", "labels", "notes")
    }
    return first.model_copy(
        update={
            "shards": [
                replace(shard, name=f"{place}/{shard.name}")  # corpora name their shards alike
                for place, manifest in enumerate(manifests)
                for shard in manifest.shards
            ],
            "ledgers": [],
            "totals": totals | {"longest_tokens": max(manifest.totals["longest_tokens"] for manifest in manifests)},
            "config_hash": hash_json([manifest.config_hash for manifest in manifests]),
            **{name: dict(sum(map(Counter, of_corpora), Counter[str]())) for name, of_corpora in counts.items()},
        }
    )
