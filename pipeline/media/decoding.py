"""Decoding of images, clips and documents in another process with bounded memory and time.

A file of 30 bytes can decode to gigabytes, and one of a few megabytes can take hours, without more pixels than allowed.
The kernel ends the process, so the bounds hold for every format and library, and no file harms the task that reads it.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

import msgspec
import numpy as np
from pydantic import TypeAdapter

from declutr.pipeline.readers.corpus import DOCUMENT_SUFFIXES, MIB
from declutr.pipeline.shards.content import ImagesContent, MediaContent
from declutr.pipeline.shards.media import Media

_OUT_OF_MEMORY = 3  # exit status of a process that reached its limit of memory
# Signals by which a decoder ends itself on a damaged file.
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
_ENDING_SECONDS = 10.0
_ENVIRONMENT = {
    # Each thread of BLAS takes memory, and the memory is limited.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1"),
    # glibc would return the memory of each image to the system and get it back: a fifth of the time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
_CHILD = "import sys; from declutr.pipeline.media.decoding import answer_batches; answer_batches(*sys.argv[1:])"
_ADDRESS = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")
_SHOWN_CHARACTERS = 200


class UndecodableError(ValueError):
    """A file is damaged, hostile or of an unknown kind; `reason` is counted as a failure."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsuitableError(UndecodableError):
    """A file holds nothing to train on; `reason` is counted as a drop."""


def library_message(error: BaseException) -> str:
    """The message of a library in one line, the same in every process: without addresses in memory."""
    message = " ".join(_ADDRESS.sub("the file", str(error)).split()) or type(error).__name__
    return message[:_SHOWN_CHARACTERS]


class Decoded(msgspec.Struct, frozen=True):
    """An image or clip as the shards hold it."""

    media: Media
    id: bytes  # 16 bytes: a hash of the stored pixels or frames, without the label
    notes: tuple[str, ...]  # changes that are counted, such as `first_frame`


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one decode; a file beyond them is a failure."""

    # Memory of the process that decodes, in addition to its libraries. A progressive JPEG of the most pixels needs 0.9
    # GiB.
    memory_mib: int = 1280
    cpu_seconds: float = 20.0  # time of the processor


LIMITS = Limits()
FAILED, UNSUITABLE = range(2)

Answer = Decoded | str | tuple[int, str, str]
"""An image or clip; a text; or FAILED or UNSUITABLE, the reason, and a message."""
# Answers travel as msgpack: a decoder that a file has taken over could misuse pickle.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda frames: (frames.shape, frames.tobytes()))
_DECODER = msgspec.msgpack.Decoder(
    list[Answer], dec_hook=lambda _, frames: np.frombuffer(frames[1], np.float32).reshape(frames[0])
)


def answer_batches(memory_mib: str, cpu_seconds: str, batches_file: str, answers_file: str) -> None:
    """The work of the process: answers batches of files until the pipe of batches is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # on damaged metadata, which is not used
    os.dup2(2, 1)  # what a library prints is no output of the command
    batches = Connection(int(batches_file), writable=False)
    answers = Connection(int(answers_file), readable=False)
    decoders: dict[str, Callable[[bytes], Decoded | str]] = {}
    while True:
        try:
            content, files = msgspec.msgpack.decode(batches.recv_bytes(), type=tuple[str, list[bytes]])
        except EOFError:  # the parent has ended
            return
        if content not in decoders:  # memory and time of the libraries do not count
            decoders |= _decoders(content)
            _limit_memory(int(memory_mib))
        try:
            batch = list[Answer]()
            for data in files:
                signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # SIGPROF ends this process
                try:
                    answer = decoders[content](data)
                    batch.append(answer.encode("utf-8", "replace").decode() if isinstance(answer, str) else answer)
                except UndecodableError as error:
                    kind = UNSUITABLE if isinstance(error, UnsuitableError) else FAILED
                    batch.append((kind, error.reason, str(error).encode("utf-8", "backslashreplace").decode()))
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.send_bytes(_ENCODER.encode(batch))
        except BrokenPipeError:  # the parent ended while it waited for these answers
            return
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)


def _limit_memory(memory_mib: int) -> None:
    """Limits the memory of this process to that in use now and `memory_mib` more; not on macOS, which cannot."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        max_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() + memory_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.RLIM_INFINITY))


def _decoders(key: str) -> dict[str, Callable[[bytes], Decoded | str]]:
    """The function that decodes files of this content, with its libraries loaded; those of all kinds of documents."""
    if key in DOCUMENT_SUFFIXES.values():
        from declutr.pipeline.media.documents import extracted  # loads the libraries of all kinds

        return {kind: partial(extracted, kind=kind) for kind in DOCUMENT_SUFFIXES.values()}
    content: MediaContent = TypeAdapter(MediaContent).validate_json(key)
    if isinstance(content, ImagesContent):
        from PIL import Image as Pillow

        from declutr.pipeline.media.images import decode_image

        Pillow.init()  # loads what every format needs
        return {key: partial(decode_image, content=content, label="")}
    from declutr.pipeline.media.clips import decode_clip, load_libraries

    load_libraries(content)
    return {key: partial(decode_clip, content=content, label="")}


class _Child:
    """A process of `answer_batches`. It ends when its pipe is closed, so also when this process ends."""

    def __init__(self, limits: Limits) -> None:
        batches, self._batches = Pipe(duplex=False)
        self._answers, answers = Pipe(duplex=False)
        files = (batches.fileno(), answers.fileno())
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, *map(str, (limits.memory_mib, limits.cpu_seconds, *files))],
            stdin=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            pass_fds=files,
        )
        batches.close()
        answers.close()
        self.is_new = True
        self.batch: Sequence[bytes] | None = None  # the one with the files whose answers are awaited

    def answer(self, content: str, files: Sequence[bytes], batch: Sequence[bytes]) -> list[Answer] | None:
        """The answers to files of a batch; None if the process ended before it had sent them."""
        self.batch = batch
        try:
            self._batches.send_bytes(msgspec.msgpack.encode((content, files)))
            answers = _DECODER.decode(self._answers.recv_bytes())
        except (EOFError, OSError) as error:
            if not batch:
                raise InterruptedError("the batch was abandoned") from error
            return None
        self.is_new, self.batch = False, None
        return answers

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        self._process.kill()

    def end(self) -> int:
        """Waits for the end of a process whose answers have ended; returns its exit status."""
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._batches.close()
        self._answers.close()
        return status


_children: dict[Limits, _Child] = {}  # each waits for the next files, because a start takes 0.3 s of the processor
_turns = Lock()  # a process answers one batch at a time


def decode(content: MediaContent | str, files: Sequence[bytes], limits: Limits) -> list[Answer]:
    """The answer for each image, clip or html, docx or pdf file (`content`: its kind), in order, without labels."""
    key = content if isinstance(content, str) else content.model_dump_json()
    with _turns:
        try:
            answers = _child(limits).answer(key, files, files) if files else []
            if answers is None:  # one of the files has ended the process
                _children.pop(limits).end()
                answers = [_alone(key, data, files, limits) for data in files]
        except BaseException:  # a signal can come between a batch and its answers, which the next batch would get
            if child := _children.pop(limits, None):
                child.kill()
                child.end()
            raise
    return answers


def abandon(batch: list[bytes]) -> None:
    """Ends the decoding of a batch for whose answers nobody waits any more, and empties it: it can take minutes."""
    batch.clear()  # first, for a thread that has not yet sent it
    for child in tuple(_children.values()):
        if child.batch is batch:
            child.kill()


def _child(limits: Limits) -> _Child:
    if limits not in _children:
        _children[limits] = _Child(limits)
    return _children[limits]


def _alone(content: str, data: bytes, batch: Sequence[bytes], limits: Limits) -> Answer:
    """The answer for one file of a batch, or the failure of one that ends its process.

    Earlier files of a process must not decide, so such a file is tried again as the first of a new process.
    """
    while True:
        child = _child(limits)
        if answers := child.answer(content, [data], batch):
            return answers[0]
        status = _children.pop(limits).end()
        if status == -signal.SIGPROF:
            return FAILED, "too_slow", f"decoding it takes more than {limits.cpu_seconds:g} s of the processor"
        if not child.is_new:
            continue
        if status == _OUT_OF_MEMORY:
            return FAILED, "too_much_memory", f"decoding it takes more than {limits.memory_mib} MiB of memory"
        if -status in _CRASHES:
            return FAILED, "undecodable", f"its decoder ended with {signal.Signals(-status).name}"
        raise OSError(f"the process that decodes files ended with status {status}; is memory short?")
