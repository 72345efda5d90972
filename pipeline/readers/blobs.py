"""Readers of files that are one image, clip or document each: plain files and members of archives.

They are read as the bytes of their files; pipeline/media decodes them. Images and clips in Parquet: rows.py.
"""

from collections import deque
from dataclasses import dataclass, replace
from itertools import groupby

from declutr.pipeline.readers.corpus import (
    DOCUMENT_SUFFIXES,
    MIB,
    Blob,
    Document,
    ReadFailure,
    Records,
    Rejected,
    bare_suffix,
    failed,
)
from declutr.pipeline.readers.streams import BLOCK_BYTES, Body, bounded_content

LABEL_ALONE = "label_alone"  # reason of a label without an image or clip next to it
LABEL_SUFFIX = ".cls"
_LABEL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Label(Document):
    """The label in `text`, of the images or clips with the same name."""


def read_blob(body: Body) -> Records:
    """The image or clip of one file, or an html, docx or pdf file."""
    max_bytes = body.rules.max_bytes if body.rules.blobs else MAX_DOCUMENT_BYTES  # else the setting limits the text
    setting = "corpus.max_document_mib = " if body.rules.blobs else ""
    data = bounded_content(body, max_bytes, f"the file has more than {setting}{max_bytes / MIB:g} MiB")
    yield data if isinstance(data, ReadFailure) else Blob("", body.source, 0, bytes(data), None)


MAX_DOCUMENT_BYTES = 128 * MIB  # largest html, docx or pdf file; two processes hold it
_STARTS = ((b"%pdf-", "pdf"), (b"<!doctype html", "html"), (b"<html", "html"))


def document_kind(head: bytes, name: str) -> str | None:
    """html, docx or pdf by content, then name; None for a file with another suffix."""
    suffix, start = bare_suffix(name), head[:BLOCK_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()  # mark of UTF-8
    if suffix and suffix not in DOCUMENT_SUFFIXES:
        return None
    return next((kind for mark, kind in _STARTS if start.startswith(mark)), DOCUMENT_SUFFIXES.get(suffix))


def read_label(body: Body) -> Records:
    """The label of one file."""
    data = bounded_content(body, _LABEL_BYTES, f"the file has more than {_LABEL_BYTES} bytes")
    try:
        yield data if isinstance(data, ReadFailure) else _Label(data.decode().strip(), body.source, 0)
    except UnicodeDecodeError as error:
        yield failed("bad_label", body.source, 0, f"not UTF-8: {error.reason}")


def read_other(body: Body) -> Records:
    """The record of a file that is neither an image or clip nor a label."""
    yield Rejected("", body.source, 0, "other_file")


def member_key(name: str) -> str:
    """The name that an image or clip and its label share: without everything after the first dot of the file's name."""
    start = max(name.rfind("/"), name.rfind("!")) + 1  # the dots of folders and archives do not count
    return name[:start] + name[start:].partition(".")[0]


def with_labels(records: Records, max_bytes: int) -> Records:
    """The records of an archive, where the label of a name goes to the images or clips of that name around it.

    Those of one name are held until the next name, but not more than `max_bytes` bytes of them.
    """
    label: _Label | None
    for _, members in groupby(records, key=lambda record: member_key(record.source)):
        blobs, num_bytes, label, used = deque[Blob](), 0, None, False
        for record in members:
            if isinstance(record, _Label) and label is None:
                label = record
            elif isinstance(record, _Label):
                yield Rejected("", record.source, 0, LABEL_ALONE)
            elif isinstance(record, Blob) and record.label is None:
                blobs.append(record)
                num_bytes += len(record.data)
                # Images of one name could otherwise fill the memory.
                while len(blobs) > 1 and num_bytes > max_bytes:
                    num_bytes -= len(blobs[0].data)
                    yield _labelled(blobs.popleft(), label)
                    used = True
            else:
                yield record
        if label is not None and not blobs and not used:
            yield Rejected("", label.source, 0, LABEL_ALONE)
        for blob in blobs:
            yield _labelled(blob, label)


def _labelled(blob: Blob, label: _Label | None) -> Blob:
    return replace(blob, label=label.text or None) if label else blob
