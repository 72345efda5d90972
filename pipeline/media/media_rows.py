"""Rows of a corpus of images or clips with their labels, made from the blobs of its readers.

Decoding in another process with bounded memory and time, so that no file can harm the task that reads it.
"""

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, BinaryIO, cast

from declutr.pipeline.media.decoded import (
    FAILED,
    LIMITS,
    OUT_OF_MEMORY,
    TOO_MUCH_MEMORY,
    TOO_SLOW,
    Answer,
    Decoded,
    Limits,
    read_answer,
    read_started,
    write_batch,
)
from declutr.pipeline.readers.blobs import BlobRules
from declutr.pipeline.readers.corpus import Blob, Document, ReadFailure, Record, Rejected, document_id
from declutr.pipeline.readers.names import AUDIO_SUFFIXES, IMAGE_SUFFIXES
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

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which a decoder ends itself on a damaged file."""
_ENDING_SECONDS = 10.0
_BUFFER_BYTES = 1 << 18
_ENVIRONMENT = {
    # Each thread of BLAS takes memory, and the memory is limited.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1"),
    # glibc would return the memory of each image to the system and get it back: a fifth of the time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class _Child:
    """A process of pipeline/media/child.py. It ends when its input is closed, so also when this process ends."""

    def __init__(self, limits: Limits) -> None:
        self._started = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = (str(limits.memory_mib), str(limits.cpu_seconds), str(self._started.fileno()))
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "declutr.pipeline.media.child", *arguments],
            bufsize=_BUFFER_BYTES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            pass_fds=[self._started.fileno()],
        )
        self.num_batches = 0

    def send(self, content: str, files: Sequence[bytes]) -> None:
        """Starts to decode a batch. If the process has ended, `answers` and `end` find out."""
        self.num_batches += 1
        with suppress(BrokenPipeError):
            write_batch(cast(BinaryIO, self._process.stdin), content, files)

    def answers(self, number: int) -> list[Answer]:
        """The first answers to the batch: all of them, or fewer because the process has ended."""
        answers: list[Answer] = []
        while len(answers) < number and (answer := read_answer(cast(BinaryIO, self._process.stdout))) is not None:
            answers.append(answer)
        return answers

    def end(self, *, ending: bool = False) -> tuple[int, int]:
        """Ends the process, or waits for the end of one whose answers have ended.

        Returns:
            Its exit status (minus a signal), and the place in the batch of the file that it decoded last.
        """
        if not ending:
            self._process.kill()
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of bytes that it has not read
                cast(BinaryIO, stream).close()
        with self._started:
            return status, read_started(self._started.fileno())


_idle: dict[Limits, list[_Child]] = {}
"""Processes that wait for the next decoder; a start takes 0.3 s of the processor."""


@atexit.register
def _end_idle() -> None:
    for child in (child for children in _idle.values() for child in children):
        child.end()


class Decoder:
    """A decoder of images or clips, batch by batch; use it as a context.

    This process can do other work between `send` and `answers`.
    """

    def __init__(self, content: MediaContent, limits: Limits) -> None:
        self._content = content.model_dump_json()
        self._limits = limits
        self._files: Sequence[bytes] = ()
        self._child: _Child | None = None

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._child is not None and self._files:  # its answers are not wanted any more
            self._child.end()
        elif self._child is not None:
            _idle.setdefault(self._limits, []).append(self._child)
        self._child = None

    def send(self, files: Sequence[bytes]) -> None:
        """Starts to decode the bytes of files."""
        self._files = files
        if not files:
            return
        if self._child is None:
            idle = _idle.get(self._limits)
            self._child = idle.pop() if idle else _Child(self._limits)
        self._child.send(self._content, files)

    def answers(self) -> list[Answer]:
        """The answer for each file of the batch, in order, without labels.

        Raises:
            OSError: the process was killed from outside, or cannot start.
        """
        files, left = self._files, list(range(len(self._files)))
        answer_of: dict[int, Answer] = {}
        while left:
            assert self._child is not None
            answers = self._child.answers(len(left))
            answer_of |= zip(left, answers, strict=False)
            left, before = left[len(answers) :], left
            if not left:
                break
            first = self._child.num_batches == 1
            status, place = self._child.end(ending=True)
            self._child, last = None, before[place]
            left.remove(last)
            # Earlier files of a process must not decide, so the file comes first in a new one.
            if status == -signal.SIGPROF or (first and place == 0):
                answer_of[last] = self._verdict(status)
            else:
                left.insert(0, last)
            self.send([files[number] for number in left])
        self._files = ()
        return [answer_of[number] for number in range(len(files))]

    def _verdict(self, status: int) -> Answer:
        """The failure of a file at which the process ended."""
        if status == -signal.SIGPROF:
            return FAILED, TOO_SLOW, f"decoding it takes more than {self._limits.cpu_seconds:g} s of the processor"
        if status == OUT_OF_MEMORY:
            return FAILED, TOO_MUCH_MEMORY, f"decoding it takes more than {self._limits.memory_mib} MiB of memory"
        if -status in _CRASHES:
            return FAILED, "undecodable", f"its decoder ended with {signal.Signals(-status).name}"
        raise OSError(f"the process that decodes images and clips ended with status {status}; is memory short?")


NO_LABEL = "no_label"
"""Failure reason of an image or clip without a label."""
MAX_CHARACTERS = 255
"""Longest label."""


class LabelError(ValueError):
    """An image or clip has no usable label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def label_of(blob: Blob, rule: LabelRule) -> str:
    """The label of an image or clip; "" without labels.

    A label stored with it comes before the rule.

    Raises:
        LabelError: it has none, or a very long one.
    """
    if rule is None:
        return ""
    label = blob.label if blob.label is not None else _from_path(blob.source, rule)
    if not label:
        places = {FOLDER: "is in no folder", PARENT_FOLDER: "has no folder above its folder"}
        where = places.get(rule, f"does not match content.label = {rule!r}")
        raise LabelError(NO_LABEL, f"its path {where}, and no label is stored with it; content.label=null needs none")
    if len(label) > MAX_CHARACTERS:
        raise LabelError("bad_label", f"a label of {len(label)} characters, at most {MAX_CHARACTERS} are possible")
    return label


_MEMBER = re.compile(r"\.(?:tar|tgz|txz|gz|xz|zstd?|bz2)!", re.IGNORECASE)  # the names of others may have a "!", too


def _from_path(source: str, rule: str) -> str | None:
    """The label in a path relative to the corpus."""
    if rule in (FOLDER, PARENT_FOLDER):
        # In an archive, the folders around the archive are not those of the member.
        names, level = _MEMBER.split(source)[-1].split("/"), 2 if rule == FOLDER else 3
        return names[-level] if len(names) >= level else None
    match = _compiled(rule).search(source)
    return match[1] if match else None


@lru_cache(maxsize=4)
def _compiled(rule: str) -> re.Pattern[str]:
    return re.compile(rule)


_BATCH_BYTES = 2 << 20
_BATCH_FILES = 64


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
class RejectedMedia(Rejected):
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


def media_rows(records: Iterator[Record], content: MediaContent, limits: Limits = LIMITS) -> Iterator[Record]:
    """A row, a failure or a left-out record for each image or clip; other records stay.

    A batch is decoded in another process while the rows of the batch before are used.
    """
    with Decoder(content, limits) as decoder:
        sent: list[Record] = []
        for batch in batches(records, _size, _BATCH_BYTES, _BATCH_FILES):
            labelled = [_labelled(record, content) for record in batch]
            done = _rows(sent, decoder.answers())
            decoder.send([record.data for record in labelled if isinstance(record, Blob)])
            sent = labelled
            yield from done
        yield from _rows(sent, decoder.answers())


def _rows(records: list[Record], answers: list[Answer]) -> list[Record]:
    """The records with the answers for their images or clips."""
    remaining = iter(answers)
    return [_row(record, next(remaining)) if isinstance(record, Blob) else record for record in records]


def _size(record: Record) -> int:
    return len(record.data) if isinstance(record, Blob) else 0


def _labelled(record: Record, content: MediaContent) -> Record:
    """The record with its label; its failure if it has none."""
    if not isinstance(record, Blob):
        return record
    try:
        return replace(record, label=label_of(record, content.label))
    except LabelError as error:
        return ReadFailure(reason=error.reason, source=record.source, offset=record.offset, message=str(error))


def _row(blob: Blob, answer: Answer) -> Record:
    """The row of an image or clip, or the reason why it forms none."""
    if isinstance(answer, Decoded):
        media = answer.media
        if blob.label:
            media = replace(media, label=blob.label)
        return MediaRow("", blob.source, blob.offset, answer.id, media, len(blob.data), answer.notes)
    kind, reason, message = answer
    if kind == FAILED:
        return ReadFailure(reason=reason, source=blob.source, offset=blob.offset, message=message)
    return RejectedMedia("", blob.source, blob.offset, reason, document_id(blob.data), len(blob.data), message)
