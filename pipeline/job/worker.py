"""The work of one task: read a unit, choose, tokenize, write (only candidates if duplicates are to be removed)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import PipelineConfig
from pipeline.duplicates.config import DuplicatesConfig
from pipeline.duplicates.keys import write_keys
from pipeline.duplicates.signatures import Signer
from pipeline.filters.config import FiltersConfig
from pipeline.filters.document_filter import DocumentFilter
from pipeline.filters.evaluation_sets import INDEX
from pipeline.filters.whitespace import normalise
from pipeline.job.judging import Judged, judge_unread, judged_media, splits_of
from pipeline.job.progress import Done, Heartbeat
from pipeline.job.unit_writer import UnitWriter
from pipeline.job.units import Unit, read_unit, stamp_read
from pipeline.readers.corpus import Document, Record, document_id
from pipeline.shards.content import NO_LABEL, Layout
from pipeline.shards.ledger import Entry
from pipeline.shards.manifest import TOKENIZER, Sidecar
from pipeline.shards.media import Clip, Image, Media
from pipeline.shards.windows import EMPTY, drop_reason
from pipeline.texts.rows import TextRow, row_id
from pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName, batches
from pipeline.tokenizer.tokenization import TokenizerInfo

CANDIDATES = "candidates"
"""Folder in the output folder for the files of units before duplicates are found."""
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000


def stage_folder(folder: Path, config: PipelineConfig) -> Path:
    """Target folder of `write_unit`: the output folder, or a folder in it if duplicates are searched for."""
    return folder / CANDIDATES if config.duplicates.enabled else folder


def write_unit(
    unit: Unit,
    folder: Path,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None = "tokenizers",
) -> Sidecar:
    """Prepares one unit in an output folder that holds the tokenizer.

    The bytes written depend only on the unit, the settings and the tokenizer, not on the engine that applies it.

    Raises:
        OSError: an input was changed after planning.
        ShardError: the tokenizer gave an id beyond its vocabulary, or the counts do not balance.
    """
    target = stage_folder(folder, config)
    writer = UnitWriter(target, unit, config, tokenizer)
    keys = _Keys(config.duplicates) if config.duplicates.enabled else None
    with writer:
        reading, heartbeat = read_unit(unit, config.corpus, config.content), Heartbeat(folder, unit.name)
        for ordinal, (judged, content) in enumerate(judged_records(reading, folder, config, tokenizer, engine)):
            entry = judged.entry
            if content is None:
                writer.reject(entry, judged.text)
            else:
                writer.keep(entry, content, judged.layout)
                if keys is not None:
                    keys.add(ordinal, judged, content)
            if heartbeat.due():
                heartbeat.beat(Done.of(writer.tally.counts(), reading.bytes_read))
    if keys is not None:
        write_keys(target, unit.name, config.duplicates, keys.ids, keys.ordinals, keys.signatures, keys.labels)
    return writer.finish(stamp_read(unit))


class _Keys:
    """Data of a unit's documents for the search for duplicates."""

    def __init__(self, config: DuplicatesConfig) -> None:
        self.ids: list[bytes] = []
        self.ordinals: list[int] = []
        self.signatures: list[NDArray[np.uint32]] = []
        self.labels: list[str] = []
        self._signer = Signer(config.near) if config.near else None

    def add(self, ordinal: int, judged: Judged, content: NDArray[np.uint32] | Media) -> None:
        """Adds a candidate."""
        self.ids.append(judged.entry.id or b"")
        self.ordinals.append(ordinal)
        if isinstance(content, Image | Clip) and content.label:
            self.labels.append(content.label)
        if self._signer is not None:
            self.signatures.append(self._signer.sign(judged.text))


def judged_records(
    records: Iterator[Record],
    folder: Path,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None,
) -> Iterator[tuple[Judged, NDArray[np.uint32] | Media | None]]:
    """Every record with its fate, in order, and its tokens, image or clip if it is kept, else None."""
    if tokenizer is None or engine is None:
        return judged_media(records, config)
    return _judged_texts(records, folder, config, tokenizer, engine)


def _judged_texts(
    records: Iterator[Record], folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo, engine: EngineName
) -> Iterator[tuple[Judged, NDArray[np.uint32] | None]]:
    """Every text with its fate, in order, and its tokens `(num_tokens,)` if it is kept, else None."""
    # Both may be links in a temporary folder, to files that are the same for every task of a host.
    encoder = _encoder(str((folder / TOKENIZER).resolve()), tokenizer.fingerprint, engine)
    document_filter = _document_filter(config.filters.model_dump_json(), str((folder / INDEX).resolve()))
    documents = (_judge(record, document_filter, config) for record in records)
    for batch in batches(documents, lambda judged: len(judged.text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
        going = [judged for judged in batch if not judged.entry.fate]
        encoded = iter(encoder.encode([text for judged in going for text in judged.texts or (judged.text,)]))
        splits = iter(splits_of([judged.split_key for judged in going], config))
        for judged in batch:
            if judged.entry.fate:
                yield judged, None
                continue
            texts, split = list(islice(encoded, max(1, len(judged.texts)))), next(splits)
            tokens = texts[0] if len(texts) == 1 else np.concatenate(texts)
            if not judged.texts:
                reason = drop_reason(len(tokens), config.geometry, config.short_documents)
                layout = None
            else:
                reason = None if all(map(len, texts)) else EMPTY
                starts = np.cumsum([0, *map(len, texts[:-1])]).astype(np.int32)
                layout = Layout(starts, np.array(judged.labels, np.int8))
            entry = replace(judged.entry, num_tokens=len(tokens), fate=reason or split)
            yield Judged(entry, judged.text, layout=None if reason else layout), None if reason else tokens


def _judge(record: Record, document_filter: DocumentFilter, config: PipelineConfig) -> Judged:
    """Judges a row before it is tokenized. Rules see its texts joined by newlines."""
    if (unread := judge_unread(record)) is not None:
        return unread
    assert isinstance(record, Document)
    if isinstance(record, TextRow):
        finish = normalise if config.filters.normalise_whitespace else str
        texts = tuple(map(finish, record.texts))
        choice = replace(document_filter.apply("\n".join(texts)), text="\n".join(texts))
        identity, labels = row_id(texts, record.labels), record.labels
    else:
        choice = document_filter.apply(record.text)
        texts, labels = ((choice.text,), (NO_LABEL,)) if config.content.kind == "sentences" else ((), ())
        identity = document_id(choice.text.encode())
    raw = choice.text.encode()
    entry = Entry(
        identity,
        record.source,
        record.offset,
        len(raw),
        None,
        choice.language,
        choice.reason or "",
        None,
        choice.detail,
    )
    return Judged(entry, choice.text, texts, labels)


@lru_cache(maxsize=2)
def _encoder(folder: str, fingerprint: str, engine: EngineName) -> BatchTokenizer:  # noqa: ARG001
    """One batch tokenizer a process; the fingerprint distinguishes successive tokenizers in the same folder."""
    return BatchTokenizer.load(Path(folder), engine)


@lru_cache(maxsize=2)
def _document_filter(config: str, index: str) -> DocumentFilter:
    """One filter a process."""
    path = Path(index)
    return DocumentFilter(FiltersConfig.model_validate_json(config), path if path.exists() else None)
