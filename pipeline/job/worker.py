"""The work of one task: read a unit, choose, tokenize, write (only candidates if duplicates are to be removed)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.keys import write_keys
from declutr.pipeline.duplicates.shingles import Signer
from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig, normalise
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.progress import Done, UnitHeartbeat
from declutr.pipeline.job.unit_writer import Decision, UnitWriter, decide_media, decide_unread, splits_of
from declutr.pipeline.job.units import Unit, input_state_read, read_unit
from declutr.pipeline.readers.corpus import Document, Record, document_id
from declutr.pipeline.shards.content import NO_LABEL, Layout
from declutr.pipeline.shards.ledger import Entry
from declutr.pipeline.shards.manifest import TOKENIZER, Sidecar
from declutr.pipeline.shards.media import Clip, Image, Media
from declutr.pipeline.shards.windows import EMPTY, drop_reason
from declutr.pipeline.texts import TextRow, row_id
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName, batches
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

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
        reader, heartbeat = read_unit(unit, config.corpus, config.content), UnitHeartbeat(folder, unit.name)
        for ordinal, (decision, content) in enumerate(decide_records(reader, folder, config, tokenizer, engine)):
            entry = decision.entry
            if content is None:
                writer.reject(entry, decision.text)
            else:
                writer.keep(entry, content, decision.layout)
                if keys is not None:
                    keys.add(ordinal, decision, content)
            if heartbeat.due():
                heartbeat.beat(Done.of(writer.running.counts(), reader.bytes_read))
    if keys is not None:
        write_keys(target, unit.name, config.duplicates, keys.ids, keys.ordinals, keys.signatures, keys.labels)
    return writer.finish(input_state_read(unit))


class _Keys:
    """Data of a unit's documents for the search for duplicates."""

    def __init__(self, config: DuplicatesConfig) -> None:
        self.ids: list[bytes] = []
        self.ordinals: list[int] = []
        self.signatures: list[NDArray[np.uint32]] = []
        self.labels: list[str] = []
        self._signer = Signer(config.near) if config.near else None

    def add(self, ordinal: int, decision: Decision, content: NDArray[np.uint32] | Media) -> None:
        """Adds a candidate."""
        self.ids.append(decision.entry.id or b"")
        self.ordinals.append(ordinal)
        if isinstance(content, Image | Clip) and content.label:
            self.labels.append(content.label)
        if self._signer is not None:
            self.signatures.append(self._signer.sign(decision.text))


def decide_records(
    records: Iterator[Record],
    folder: Path,
    config: PipelineConfig,
    tokenizer: TokenizerInfo | None,
    engine: EngineName | None,
) -> Iterator[tuple[Decision, NDArray[np.uint32] | Media | None]]:
    """Every record with its status, in order, and its tokens, image or clip if it is kept, else None."""
    if tokenizer is None or engine is None:
        return decide_media(records, config)
    return _decide_texts(records, folder, config, tokenizer, engine)


def _decide_texts(
    records: Iterator[Record], folder: Path, config: PipelineConfig, tokenizer: TokenizerInfo, engine: EngineName
) -> Iterator[tuple[Decision, NDArray[np.uint32] | None]]:
    """Every text with its status, in order, and its tokens `(num_tokens,)` if it is kept, else None."""
    # Both may be links in a temporary folder, to files that are the same for every task of a host.
    encoder = _encoder(str((folder / TOKENIZER).resolve()), tokenizer.fingerprint, engine)
    index = (folder / INDEX).resolve()
    made_ns = index.stat().st_mtime_ns if index.exists() else 0
    document_filter = _document_filter(config.filters.model_dump_json(), str(index), made_ns)
    documents = (_decide(record, document_filter, config) for record in records)
    for batch in batches(documents, lambda decision: len(decision.text), _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
        going = [decision for decision in batch if not decision.entry.status]
        encoded = iter(encoder.encode([text for decision in going for text in decision.texts or (decision.text,)]))
        splits = iter(splits_of([decision.split_key for decision in going], config))
        for decision in batch:
            if decision.entry.status:
                yield decision, None
                continue
            texts, split = list(islice(encoded, max(1, len(decision.texts)))), next(splits)
            tokens = texts[0] if len(texts) == 1 else np.concatenate(texts)
            if not decision.texts:
                reason = drop_reason(len(tokens), config.geometry, config.short_documents)
                layout = None
            else:
                reason = None if all(map(len, texts)) else EMPTY
                starts = np.cumsum([0, *map(len, texts[:-1])]).astype(np.int32)
                layout = Layout(starts, np.array(decision.labels, np.int8))
            entry = replace(decision.entry, num_tokens=len(tokens), status=reason or split)
            yield Decision(entry, decision.text, layout=None if reason else layout), None if reason else tokens


def _decide(record: Record, document_filter: DocumentFilter, config: PipelineConfig) -> Decision:
    """Decides on a row before it is tokenized. Rules see its texts joined by newlines."""
    if (unread := decide_unread(record)) is not None:
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
    return Decision(entry, choice.text, texts, labels)


@lru_cache(maxsize=2)
def _encoder(folder: str, fingerprint: str, engine: EngineName) -> BatchTokenizer:  # noqa: ARG001
    """One batch tokenizer a process; the fingerprint distinguishes successive tokenizers in the same folder."""
    return BatchTokenizer.load(Path(folder), engine)


@lru_cache(maxsize=2)
def _document_filter(config: str, index: str, made_ns: int) -> DocumentFilter:
    """One filter a process; the time distinguishes successive indexes in the same folder, and is 0 without one."""
    return DocumentFilter(FiltersConfig.model_validate_json(config), Path(index) if made_ns else None)
