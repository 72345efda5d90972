"""Rows of a corpus of images or clips, made from the blobs of its readers."""

from dataclasses import dataclass

from pipeline.readers.corpus import Document, LeftOut
from pipeline.shards.media import Media


@dataclass(frozen=True, slots=True)
class MediaRow(Document):
    """An image or a clip as the shards hold it; `text` is empty."""

    id: bytes
    """16 bytes: a hash of the stored pixels or frames, without the label."""
    media: Media
    num_bytes: int
    """Bytes of the file that it was read from."""
    notes: tuple[str, ...]
    """Changes that are counted, such as `first_frame`."""


@dataclass(frozen=True, slots=True)
class LeftOutMedia(LeftOut):
    """An image or a clip that forms no row."""

    id: bytes
    """16 bytes: a hash of its file."""
    num_bytes: int
    """Bytes of the file."""
    detail: str | None = None
    """Deciding figure."""
