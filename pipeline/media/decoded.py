"""The result of decoding one image or clip, its bounds, and the messages of the process that decodes."""

import os
import re
import resource
import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from declutr.pipeline.shards.media import Clip, Image, Media


class UndecodableError(ValueError):
    """A file is damaged, hostile or of an unknown kind; `reason` is counted as a failure."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsuitableError(ValueError):
    """A sound file holds nothing to train on; `reason` is counted as a drop."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


_ADDRESS = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")
_SHOWN_CHARACTERS = 200


def library_message(error: BaseException) -> str:
    """The message of a library in one line, the same in every process: without addresses in memory."""
    message = " ".join(_ADDRESS.sub("the file", str(error)).split()) or type(error).__name__
    return message[:_SHOWN_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image or clip as the shards hold it."""

    media: Media
    id: bytes
    """16 bytes: a hash of the stored pixels or frames, without the label."""
    notes: tuple[str, ...]
    """Changes that are counted, such as `first_frame`."""


MIB = 2**20
TOO_MUCH_MEMORY = "too_much_memory"
TOO_SLOW = "too_slow"
OUT_OF_MEMORY = 3
"""Exit status of a process that reached its limit of memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one decode; an image or clip beyond them is a failure."""

    memory_mib: int = 1280
    """Memory of the process that decodes, in addition to its libraries. A progressive JPEG of the most pixels needs
    0.9 GiB."""
    cpu_seconds: float = 20.0
    """Time of the processor."""


LIMITS = Limits()


def limit_memory(limits: Limits) -> None:
    """Limits the memory of this process to that in use now and `memory_mib` more; not on macOS, which cannot."""
    if not Path("/proc/self/statm").exists():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = pages * resource.getpagesize() + limits.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))


def limit_time(limits: Limits) -> None:
    """Ends this process by SIGPROF when it has used `cpu_seconds` of the processor from now on."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)


IMAGE, CLIP, FAILED, UNSUITABLE = range(4)

Answer = Decoded | tuple[int, str, str]
"""An image or clip; or FAILED or UNSUITABLE, the reason, and a message."""

_NUMBER = struct.Struct("<Q")
_Batch = tuple[str, list[bytes]]
_Fields = tuple[int, bytes, tuple[int, int], list[str], bytes]
"""An answer on its way: kind, id, two sizes, notes or reason and message, bytes of the image or frames."""


def write_batch(stream: BinaryIO, content: str, files: Sequence[bytes]) -> None:
    """Writes files, and the settings of their content as JSON."""
    _write(stream, (content, files))
    stream.flush()


def read_batch(stream: BinaryIO) -> _Batch | None:
    """Reads what `write_batch` wrote; None at the end."""
    batch: _Batch | None = _read(stream, _Batch)
    return batch


def write_started(file: int, place: int) -> None:
    """Notes the place in the batch of the file that is decoded next: answers that were not sent yet may be lost."""
    os.pwrite(file, _NUMBER.pack(place), 0)


def read_started(file: int) -> int:
    """The place that `write_started` noted last; 0 if there is none."""
    noted = os.pread(file, _NUMBER.size, 0)
    return int(_NUMBER.unpack(noted)[0]) if noted else 0


def write_answer(stream: BinaryIO, answer: Answer) -> None:
    """Writes the answer for one file, without flushing it."""
    fields: _Fields
    if not isinstance(answer, Decoded):
        kind, *texts = answer
        fields = kind, b"", (0, 0), [text.encode("utf-8", "backslashreplace").decode() for text in texts], b""
    elif isinstance(answer.media, Image):
        size = answer.media.width, answer.media.height
        fields = IMAGE, answer.id, size, list(answer.notes), answer.media.png
    else:
        frames = answer.media.frames
        size = frames.shape[0], frames.shape[1]
        fields = CLIP, answer.id, size, list(answer.notes), frames.tobytes()
    _write(stream, fields)


def read_answer(stream: BinaryIO) -> Answer | None:
    """Reads what `write_answer` wrote; None if the stream ends before."""
    fields: _Fields | None = _read(stream, _Fields)
    if fields is None:
        return None
    kind, identity, (width, height), texts, payload = fields
    if kind in (FAILED, UNSUITABLE):
        return kind, texts[0], texts[1]
    if kind == IMAGE:
        return Decoded(Image(payload, width, height, ""), identity, tuple(texts))
    return Decoded(Clip(np.frombuffer(payload, np.float32).reshape(width, height), ""), identity, tuple(texts))


def _write(stream: BinaryIO, message: _Batch | _Fields | tuple[str, Sequence[bytes]]) -> None:
    encoded = msgspec.msgpack.encode(message)
    stream.write(_NUMBER.pack(len(encoded)))
    stream.write(encoded)


def _read(stream: BinaryIO, kind: Any) -> Any:
    """The next message of a kind; None if the stream ends before its end."""
    head = stream.read(_NUMBER.size)
    if len(head) < _NUMBER.size:
        return None
    size = _NUMBER.unpack(head)[0]
    encoded = stream.read(size)
    return msgspec.msgpack.decode(encoded, type=kind) if len(encoded) == size else None
