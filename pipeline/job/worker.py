"""The work of one task: read a unit, choose, tokenize and write it, or write it from its candidates without duplicates.

If duplicates are to be removed, a first task writes only candidates, and a second one selects from them.
"""

import contextlib
import gzip
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from declutr.common import seeding
from declutr.common.storage import atomic_file
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.keys import write_keys
from declutr.pipeline.duplicates.pairs import OTHER_LABEL, removed
from declutr.pipeline.duplicates.shingles import Signer
from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig, normalise
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.units import Unit, UnitReader, UnitWriter, input_state_read, load_sidecar
from declutr.pipeline.media.media_rows import MediaRow, RejectedMedia
from declutr.pipeline.readers.corpus import Document, ReadFailure, Record, Rejected, document_id
from declutr.pipeline.shards.content import NO_LABEL, AnyContent, Layout
from declutr.pipeline.shards.ledger import LEDGERS, REJECTED, Entry, ledger_entries, sum_counts
from declutr.pipeline.shards.manifest import SPLITS, TOKENIZER, Sidecar, Split
from declutr.pipeline.shards.media import Clip, Image, Media, lists, media_rows
from declutr.pipeline.shards.windows import EMPTY, drop_reason
from declutr.pipeline.texts import TextRow, row_id
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName, batches
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

BEAT_SECONDS = 2.0
CANDIDATES = "candidates"  # folder in the output folder for the files of units before duplicates are found
REASONS = {"exact": "duplicate", "near": "near_duplicate"}
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000

Content = NDArray[np.uint32] | Media  # token ids `(num_tokens,)` of a row of texts; or an image or a clip


@dataclass(frozen=True, slots=True)
class Decision:
    """A record before it is written: its ledger row, with an empty status unless a rule has dropped it."""

    entry: Entry
    text: str = ""
    texts: tuple[str, ...] = ()  # texts of a row of sentences, pairs or triples, cleaned; none for documents
    labels: tuple[int, ...] = ()  # label of each text
    layout: Layout | None = None  # places of the texts in the row's tokens, if it is kept

    @property
    def split_key(self) -> bytes:
        """16 bytes by which its split is drawn: its id, or for several texts a hash of the premise."""
        if len(self.texts) > 1:
            return document_id(normalise(self.texts[0]).encode())  # a premise in two files has two rows, in one split
        return self.entry.id or b""


def write_unit(
    unit: Unit,
    folder: Path,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None = "tokenizers",
    beats: Path | None = None,
) -> Sidecar:
    """Prepares one unit, or its candidates, in an output folder that holds the tokenizer.

    The bytes written depend only on the unit, the settings and the tokenizer, not on the engine that applies it. A file
    in the folder `beats` has the unit's progress: input bytes read, documents read, documents kept.
    """
    duplicates = config.duplicates
    target = folder / CANDIDATES if duplicates.enabled else folder
    signer = Signer(duplicates.near) if duplicates.near else None
    ids, ordinals, signatures, labels = list[bytes](), list[int](), list[NDArray[np.uint32]](), list[str]()
    last_beat = time.monotonic()
    with UnitWriter(target, unit, config, tokenizer) as writer:
        reader = UnitReader(unit, config.corpus, config.content)
        for ordinal, (decision, content) in enumerate(decide_records(reader, folder, config, tokenizer, engine)):
            entry = decision.entry
            if content is None:
                writer.reject(entry, decision.text)
            else:
                writer.keep(entry, content, decision.layout)
                if duplicates.enabled:
                    ids.append(entry.id or b"")
                    ordinals.append(ordinal)
                    signatures += [signer.sign(decision.text)] if signer else []
                    labels += [content.label] if isinstance(content, Image | Clip) and content.label else []
            # A unit can take long: a compressed file of any size is one. The folder exists only on the command's host
            # and in a shared output folder.
            if beats and time.monotonic() - last_beat >= BEAT_SECONDS and beats.is_dir():
                last_beat, counts = time.monotonic(), writer.running
                # a full disk ends the unit where it writes what matters
                with contextlib.suppress(OSError), atomic_file(beats / unit.name) as path:
                    path.write_text(json.dumps([reader.bytes_read, counts.read, counts.kept]))
    if duplicates.enabled:
        write_keys(target, unit.name, duplicates, ids, ordinals, signatures, labels)
    return writer.finish(input_state_read(unit), reader.losses)


def decide_records(
    records: Iterator[Record],
    folder: Path,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None,
) -> Iterator[tuple[Decision, Content | None]]:
    """Every record with its status, in order, and its tokens, image or clip if it is kept, else None."""
    draw = partial(splits_of, seed=config.seed, validation_fraction=config.validation_fraction)
    if tokenizer is None or engine is None:
        for record in records:
            yield _decide_media(record, draw)
        return
    # Resolved: in a temporary folder, tokenizer and index are links to files that all tasks of a host share.
    encoder = _encoder(str((folder / TOKENIZER).resolve()), tokenizer.fingerprint, engine)
    index = (folder / INDEX).resolve()
    written_ns = index.stat().st_mtime_ns if index.exists() else 0
    document_filter = _document_filter(config.filters.model_dump_json(), str(index), written_ns)
    clean: Callable[[str], str] = normalise if config.filters.normalise_whitespace else str
    documents = (_decide(record, document_filter, clean, config.content) for record in records)
    for batch in batches(documents, lambda decision: len(decision.text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
        # Tokenizing costs most, so it comes after all rules.
        undropped = [decision for decision in batch if not decision.entry.status]
        encoded = iter(encoder.encode([text for decision in undropped for text in decision.texts or (decision.text,)]))
        splits = iter(draw([decision.split_key for decision in undropped]))
        for decision in batch:
            if decision.entry.status:
                yield decision, None
                continue
            ids_of_texts = list(islice(encoded, max(1, len(decision.texts))))  # a document is one text
            split = next(splits)
            tokens = ids_of_texts[0] if len(ids_of_texts) == 1 else np.concatenate(ids_of_texts)
            if not decision.texts:
                reason = drop_reason(len(tokens), config.geometry, config.short_documents)
                layout = None
            else:
                reason = None if all(map(len, ids_of_texts)) else EMPTY  # two texts may not start at one place
                starts = np.cumsum([0, *map(len, ids_of_texts[:-1])]).astype(np.int32)
                layout = Layout(starts, np.array(decision.labels, np.int8))
            entry = replace(decision.entry, num_tokens=len(tokens), status=reason or split)
            yield Decision(entry, decision.text, layout=None if reason else layout), None if reason else tokens


def splits_of(identities: Sequence[bytes], seed: int, validation_fraction: float) -> list[Split]:
    """Splits of documents, drawn by their ids so that equal texts are never in both splits."""
    keys = np.array([int.from_bytes(identity[:8], "little") for identity in identities], dtype=np.uint64)
    drawn = seeding.unit(seeding.words(seed, "held-out", keys, np.zeros_like(keys), 1))[:, 0]
    return ["held-out" if held_out else "train" for held_out in (drawn < validation_fraction).tolist()]


def _decide_media(record: Record, draw: Callable[[Sequence[bytes]], list[Split]]) -> tuple[Decision, Media | None]:
    """Decides on an image or clip."""
    place = record.source, record.offset
    if isinstance(record, MediaRow):
        media, [split] = record.media, draw([record.id])
        notes = ", ".join(record.notes) or None
        return Decision(Entry(record.id, *place, record.num_bytes, media.size, None, split, None, notes)), media
    unread = _decide_unread(record)
    assert unread is not None
    return unread, None


def _decide_unread(record: Record) -> Decision | None:
    """Decides on a record that forms no row; None if it is one."""
    place = record.source, record.offset
    if isinstance(record, ReadFailure):
        return Decision(Entry(None, *place, 0, None, None, record.reason, None, record.message))
    if isinstance(record, RejectedMedia):
        return Decision(Entry(record.id, *place, record.num_bytes, None, None, record.reason, None, record.detail))
    if isinstance(record, Rejected):
        raw = record.text.encode()
        return Decision(Entry(document_id(raw), *place, len(raw), None, None, record.reason, None, None), record.text)
    return None


def _decide(
    record: Record, document_filter: DocumentFilter, clean: Callable[[str], str], content: AnyContent
) -> Decision:
    """Decides on a row before it is tokenized. Rules see its texts joined by newlines."""
    if (unread := _decide_unread(record)) is not None:
        return unread
    assert isinstance(record, Document)
    if isinstance(record, TextRow):
        texts = tuple(map(clean, record.texts))
        choice = replace(document_filter.apply("\n".join(texts)), text="\n".join(texts))
        identity, labels = row_id(texts, record.labels), record.labels
    else:
        choice = document_filter.apply(record.text)
        texts, labels = ((choice.text,), (NO_LABEL,)) if content.kind == "sentences" else ((), ())
        identity = document_id(choice.text.encode())
    num_bytes, status = len(choice.text.encode()), choice.reason or ""
    entry = Entry(identity, record.source, record.offset, num_bytes, None, choice.language, status, None, choice.detail)
    return Decision(entry, choice.text, texts, labels)


@lru_cache(maxsize=2)
def _encoder(folder: str, fingerprint: str, engine: EngineName) -> BatchTokenizer:  # noqa: ARG001
    """One batch tokenizer a process; the fingerprint distinguishes successive tokenizers in the same folder."""
    return BatchTokenizer.load(Path(folder), engine)


@lru_cache(maxsize=2)
def _document_filter(config: str, index: str, written_ns: int) -> DocumentFilter:
    """One filter a process; the time distinguishes successive indexes in the same folder, and is 0 without one."""
    return DocumentFilter(FiltersConfig.model_validate_json(config), Path(index) if written_ns else None)


def most_frequent_labels(candidates: Sequence[Sidecar], content: AnyContent) -> list[str] | None:
    """The labels whose rows are kept, the most frequent first; None: all."""
    limit = getattr(content, "max_labels", None)
    if limit is None:
        return None
    counted = sum_counts([sidecar.counts for sidecar in candidates]).labels
    # Ties by name, or the units' order would decide.
    return sorted(counted, key=lambda label: (-counted[label], label))[:limit]


def write_selected(unit: Unit, folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo | None) -> Sidecar:
    """Writes one unit from candidates and the list of duplicates in `folder`, without reading or tokenizing again."""
    candidates = folder / CANDIDATES
    copies, labels = removed(folder, unit.name)
    rows = {split: _rows(candidates / f"{split}-{unit.name}.arrow") for split in SPLITS}
    texts, decoder = _rejected_texts(candidates, unit.name), None
    if config.write_rejected and tokenizer is not None:
        decoder = Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json"))
    with UnitWriter(folder, unit, config, tokenizer) as writer:
        for ordinal, entry in enumerate(ledger_entries(candidates / LEDGERS / f"{unit.name}.arrow")):
            if entry.row is None:
                writer.reject(entry, next(texts) if config.write_rejected else "")
                continue
            content, layout = next(rows[entry.status])  # type: ignore[index]
            media = content if isinstance(content, Image | Clip) else None
            copy = copies.get(ordinal)
            if copy is not None:
                status = REASONS[copy.kind]
                detail = f"{copy.kept_unit}:{copy.kept_ordinal} is kept, similarity {copy.similarity:.2f}"
                if media is not None and copy.kept_label is not None:
                    status = OTHER_LABEL
                    detail += f", label {copy.kept_label!r} there, {media.label!r} here"
                    writer.conflict = writer.conflict or f"{entry.source!r}: {detail}"
            elif media is not None and labels is not None and media.label not in labels:
                status, detail = "rare_label", f"label {media.label!r} is not one of the {len(labels)} most frequent"
            else:
                writer.keep(entry, content, layout)
                continue
            text = _decoded(decoder, content, layout) if decoder and not isinstance(content, Image | Clip) else ""
            writer.reject(replace(entry, status=status, row=None, detail=detail), text)
    before = load_sidecar(candidates, unit.name)  # the inputs were read when the candidates were made
    return writer.finish(before.input_state, before.losses) if before else writer.finish()


def _decoded(decoder: Tokenizer, ids: NDArray[np.uint32], layout: Layout | None) -> str:
    """The text of a row; several texts are joined by newlines."""
    texts = [ids] if layout is None else np.split(ids, layout.starts[1:])
    return "\n".join(decoder.decode(text.tolist()).strip() for text in texts)


def _rows(shard: Path) -> Iterator[tuple[Content, Layout | None]]:
    """Content and layout of a shard's rows, in order; none if the shard does not exist."""
    if not shard.exists():
        return
    with pa.memory_map(str(shard)) as file, pa.ipc.open_file(file) as reader:
        for batch in map(reader.get_batch, range(reader.num_record_batches)):
            if "tokens" not in batch.schema.names:
                yield from ((media, None) for media in media_rows(batch))
                continue
            names = [name for name in ("tokens", "starts", "labels") if name in batch.schema.names]
            for tokens, *layout in zip(*(lists(batch.column(name)) for name in names), strict=True):
                yield tokens, Layout(*layout) if layout else None


def _rejected_texts(candidates: Path, unit: str) -> Iterator[str]:
    """Texts of the already rejected candidates, in reading order."""
    with gzip.open(candidates / REJECTED / f"{unit}.jsonl.gz", "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]
