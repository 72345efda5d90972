"""Rows of a corpus of images or clips with their labels, and texts of documents, from the blobs of its readers."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain

import msgspec

from declutr.common.errors import missing_extra
from declutr.pipeline.media.decoding import FAILED, LIMITS, Answer, Decoded, Limits, abandon, decode
from declutr.pipeline.readers.blobs import document_kind
from declutr.pipeline.readers.corpus import (
    COMPRESSED_SUFFIXES,
    TAR_SUFFIX,
    Blob,
    BlobRules,
    Document,
    Record,
    Records,
    Rejected,
    Rules,
    document_id,
    failed,
)
from declutr.pipeline.readers.lines import read_text_file
from declutr.pipeline.readers.streams import Body, ByteStream
from declutr.pipeline.shards.content import (
    FOLDER,
    PARENT_FOLDER,
    AnyContent,
    AudioContent,
    ImagesContent,
    LabelRule,
    MediaContent,
)
from declutr.pipeline.shards.media import Media
from declutr.pipeline.tokenizer.batch_tokenizer import batches

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})
AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".oga", ".opus"})
NO_LABEL = "no_label"  # failure reason of an image or clip without a label
MAX_CHARACTERS = 255  # longest label


def labelled(blob: Record, rule: LabelRule) -> Record:
    """An image or clip with its label, "" without labels; its failure if it has none, or a very long one.

    A label stored with it comes before the rule. Other records stay.
    """
    if not isinstance(blob, Blob):
        return blob
    if rule is None:
        return replace(blob, label="")
    label = blob.label if blob.label is not None else _from_path(blob.source, rule)
    if not label:
        places = {FOLDER: "is in no folder", PARENT_FOLDER: "has no folder above its folder"}
        path = f"its path {places.get(rule, f'does not match content.label = {rule!r}')}"
        message = f"{path}, and no label is stored with it; content.label=null needs none"
        return failed(NO_LABEL, blob.source, blob.offset, message)
    if len(label) > MAX_CHARACTERS:
        message = f"a label of {len(label)} characters, at most {MAX_CHARACTERS} are possible"
        return failed("bad_label", blob.source, blob.offset, message)
    return replace(blob, label=label)


# The names of others may have a "!", too.
_MEMBER = re.compile(f"(?:{'|'.join(map(re.escape, (TAR_SUFFIX, *COMPRESSED_SUFFIXES)))})!", re.IGNORECASE)


def _from_path(source: str, rule: str) -> str | None:
    """The label in a path relative to the corpus."""
    if rule in (FOLDER, PARENT_FOLDER):
        # In an archive, the folders around the archive are not those of the member.
        names, level = _MEMBER.split(source)[-1].split("/"), 2 if rule == FOLDER else 3
        return names[-level] if len(names) >= level else None
    match = re.search(rule, source)  # `re` keeps the last patterns compiled
    return match[1] if match else None


_BATCH_BYTES = 2 << 20
_BATCH_FILES = 64


@dataclass(frozen=True, slots=True)
class MediaRow(Document):
    """An image or a clip as the shards hold it; `text` is empty."""

    id: bytes  # 16 bytes: a hash of the stored pixels or frames, without the label
    media: Media
    num_bytes: int  # bytes of the file that it was read from
    notes: tuple[str, ...]  # changes that are counted, such as `first_frame`


@dataclass(frozen=True, slots=True)
class RejectedMedia(Rejected):
    """An image or a clip that forms no row."""

    id: bytes  # 16 bytes: a hash of its file
    num_bytes: int  # bytes of the file
    detail: str  # Deciding figure


def blob_rules(content: AnyContent) -> BlobRules | None:
    """Rules for reading a corpus of images or clips; None for texts."""
    if isinstance(content, ImagesContent):
        return BlobRules("images", IMAGE_SUFFIXES, "content.image", content.image, content.label_column)
    if isinstance(content, AudioContent):
        return BlobRules("audio", AUDIO_SUFFIXES, "content.audio", content.audio, content.label_column)
    return None


def media_rows(records: Records, content: MediaContent, limits: Limits = LIMITS) -> Records:
    """A row, failure or left-out record for each image or clip; a batch is decoded while rows before it are used."""
    with ThreadPoolExecutor(1) as waiter:
        sent, decoding = list[Record](), waiter.submit(list[Answer])  # before the first batch there are no answers
        pieces = batches(
            records, lambda record: len(record.data) if isinstance(record, Blob) else 0, _BATCH_BYTES, _BATCH_FILES
        )
        blobs = list[bytes]()
        try:
            for batch in chain(pieces, [list[Record]()]):  # the empty batch ends the last one
                waiting = [labelled(record, content.label) for record in batch]
                answers = iter(decoding.result())
                rows = [_row(record, next(answers)) if isinstance(record, Blob) else record for record in sent]
                blobs = [record.data for record in waiting if isinstance(record, Blob)]
                sent, decoding = waiting, waiter.submit(decode, content, blobs, limits)
                yield from rows
        finally:
            abandon(blobs)  # `waiter` would wait for it after an error, or where no more rows are wanted


def document_texts(records: Records, rules: Rules, limits: Limits = LIMITS) -> Records:
    """The text of each html, docx and pdf file, cut like that of a text file, or its failure; other records stay."""
    for record in records:
        if not isinstance(record, Blob) or (kind := document_kind(record.data, record.source)) is None:
            yield record
            continue
        if absent := missing_extra("documents", record.source):
            raise OSError(absent)  # not a failure to count: another host of the same preparation has the extra
        (answer,) = decode(kind, [record.data], limits)
        if isinstance(answer, str):
            yield from read_text_file(Body(ByteStream(BytesIO(answer.encode()).read), record.source, rules))
        elif isinstance(answer, tuple):
            yield failed(answer[1], record.source, 0, answer[2])


def _row(blob: Blob, answer: Answer) -> Record:
    """The row of an image or clip, or the reason why it forms none."""
    if isinstance(answer, Decoded):
        media = msgspec.structs.replace(answer.media, label=blob.label or "")
        return MediaRow("", blob.source, blob.offset, answer.id, media, len(blob.data), answer.notes)
    assert not isinstance(answer, str)
    kind, reason, message = answer
    if kind == FAILED:
        return failed(reason, blob.source, blob.offset, message)
    return RejectedMedia("", blob.source, blob.offset, reason, document_id(blob.data), len(blob.data), message)
