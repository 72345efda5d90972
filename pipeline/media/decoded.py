"""The result of decoding one image or clip, the reasons why it cannot be decoded, and the bounds of memory and time."""

import re
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from declutr.pipeline.shards.media import Media


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
    most = pages * resource.getpagesize() + limits.memory_mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def limit_time(limits: Limits) -> None:
    """Ends this process by SIGPROF when it has used `cpu_seconds` of the processor from now on."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
