"""Rows of a corpus of images or clips, made from the blobs of its readers."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.media.clips import decode_clip
from pipeline.media.decoded import UndecodableError, UnsuitableError
from pipeline.media.images import decode_image
from pipeline.media.labels import LabelError, label_of
from pipeline.readers.blobs import BlobRules
from pipeline.readers.corpus import Blob, Document, LeftOut, ReadFailure, Record, document_id
from pipeline.readers.names import AUDIO_SUFFIXES, IMAGE_SUFFIXES
from pipeline.shards.content import AnyContent, AudioContent, ImagesContent, MediaContent
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
    detail: str
    """Deciding figure."""


def blob_rules(content: AnyContent) -> BlobRules | None:
    """Rules for reading a corpus of images or clips; None for texts."""
    if isinstance(content, ImagesContent):
        return BlobRules("images", IMAGE_SUFFIXES, "content.image", content.image, content.label_column)
    if isinstance(content, AudioContent):
        return BlobRules("audio", AUDIO_SUFFIXES, "content.audio", content.audio, content.label_column)
    return None


def media_rows(records: Iterator[Record], content: MediaContent) -> Iterator[Record]:
    """A row, a failure or a left-out record for each image or clip; other records stay."""
    for record in records:
        yield _row(record, content) if isinstance(record, Blob) else record


def _row(blob: Blob, content: MediaContent) -> Record:
    """The row of an image or clip, or the reason why it forms none."""
    try:
        label = label_of(blob, content.label)
        if isinstance(content, ImagesContent):
            decoded = decode_image(blob.data, content, label)
        else:
            decoded = decode_clip(blob.data, content, label)
    except (LabelError, UndecodableError) as error:
        return ReadFailure(reason=error.reason, source=blob.source, offset=blob.offset, message=str(error))
    except UnsuitableError as error:
        place = (blob.source, blob.offset, error.reason)
        return LeftOutMedia("", *place, document_id(blob.data), len(blob.data), str(error))
    return MediaRow("", blob.source, blob.offset, decoded.id, decoded.media, len(blob.data), decoded.notes)
