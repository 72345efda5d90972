"""Statuses of records before they are written: splits, records that form no row, images and clips."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from declutr.common import seeding
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.filters.whitespace import normalise
from declutr.pipeline.media.media_rows import MediaRow, RejectedMedia
from declutr.pipeline.readers.corpus import ReadFailure, Record, Rejected, document_id
from declutr.pipeline.shards.content import Layout
from declutr.pipeline.shards.ledger import Entry
from declutr.pipeline.shards.manifest import Split
from declutr.pipeline.shards.media import Media, joined_notes


@dataclass(frozen=True, slots=True)
class Decision:
    """A document before it is written: its ledger row, with an empty status unless a rule has dropped it."""

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


def decide_unread(record: Record) -> Decision | None:
    """Decides on a record that forms no row; None if it is one."""
    if isinstance(record, ReadFailure):
        return Decision(
            Entry(None, record.source, record.offset, 0, None, None, record.reason, None, record.message), ""
        )
    if isinstance(record, Rejected):
        raw = record.text.encode()
        entry = Entry(document_id(raw), record.source, record.offset, len(raw), None, None, record.reason, None, None)
        return Decision(entry, record.text)
    return None


def decide_media(records: Iterator[Record], config: PipelineConfig) -> Iterator[tuple[Decision, Media | None]]:
    """Every image or clip with its status, in order."""
    for record in records:
        media, place = None, (record.source, record.offset)
        if isinstance(record, MediaRow):
            media = record.media
            [split] = splits_of([record.id], config)
            notes = joined_notes(record.notes)
            decision = Decision(Entry(record.id, *place, record.num_bytes, media.size, None, split, None, notes), "")
        elif isinstance(record, RejectedMedia):
            entry = Entry(record.id, *place, record.num_bytes, None, None, record.reason, None, record.detail)
            decision = Decision(entry, "")
        else:
            unread = decide_unread(record)
            assert unread is not None
            decision = unread
        yield decision, media
