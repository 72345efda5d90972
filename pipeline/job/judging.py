"""Fates of records before they are written: splits, records that form no row, images and clips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common import seeding
from pipeline.config import PipelineConfig
from pipeline.filters.whitespace import normalise
from pipeline.media.rows import LeftOutMedia, MediaRow
from pipeline.readers.corpus import LeftOut, ReadFailure, Record, document_id
from pipeline.shards.content import Layout
from pipeline.shards.ledger import Entry
from pipeline.shards.manifest import Split
from pipeline.shards.media import Media, joined_notes


@dataclass(frozen=True, slots=True)
class Judged:
    """A document before it is written: its ledger row, with an empty fate unless a rule has dropped it."""

    entry: Entry
    text: str
    texts: tuple[str, ...] = ()
    """Texts of a row of sentences, pairs or triples, cleaned; none for documents."""
    labels: tuple[int, ...] = ()
    """Label of each text."""
    layout: Layout | None = None
    """Places of the texts in the row's tokens, if it is kept."""

    @property
    def split_key(self) -> bytes:
        """16 bytes by which its split is drawn: its id, or for several texts a hash of the premise."""
        if len(self.texts) > 1:
            return document_id(normalise(self.texts[0]).encode())
        return self.entry.id or b""


def splits_of(identities: Sequence[bytes], config: PipelineConfig) -> list[Split]:
    """Splits of documents, drawn by their ids so that equal texts are never in both splits."""
    keys = np.array([int.from_bytes(identity[:8], "little") for identity in identities], dtype=np.uint64)
    drawn = seeding.unit(seeding.words(config.seed, "held-out", keys, np.zeros_like(keys), 1))[:, 0]
    return ["held-out" if held_out else "train" for held_out in (drawn < config.validation_fraction).tolist()]


def judge_unread(record: Record) -> Judged | None:
    """Judges a record that forms no row; None if it is one."""
    if isinstance(record, ReadFailure):
        return Judged(Entry(None, record.source, record.offset, 0, None, None, record.reason, None, record.message), "")
    if isinstance(record, LeftOut):
        raw = record.text.encode()
        entry = Entry(document_id(raw), record.source, record.offset, len(raw), None, None, record.reason, None, None)
        return Judged(entry, record.text)
    return None


def judged_media(records: Iterator[Record], config: PipelineConfig) -> Iterator[tuple[Judged, Media | None]]:
    """Every image or clip with its fate, in order."""
    for record in records:
        media, place = None, (record.source, record.offset)
        if isinstance(record, MediaRow):
            media = record.media
            [split] = splits_of([record.id], config)
            notes = joined_notes(record.notes)
            judged = Judged(Entry(record.id, *place, record.num_bytes, media.size, None, split, None, notes), "")
        elif isinstance(record, LeftOutMedia):
            entry = Entry(record.id, *place, record.num_bytes, None, None, record.reason, None, record.detail)
            judged = Judged(entry, "")
        else:
            unread = judge_unread(record)
            assert unread is not None
            judged = unread
        yield judged, media
