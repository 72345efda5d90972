"""Decoding in another process with bounded memory and time, so that no file can harm the task that reads it."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, cast

from declutr.pipeline.media.decoded import (
    FAILED,
    OUT_OF_MEMORY,
    TOO_MUCH_MEMORY,
    TOO_SLOW,
    Answer,
    Limits,
    read_answer,
    read_started,
    write_batch,
)
from declutr.pipeline.shards.content import MediaContent

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
        given = (str(limits.memory_mib), str(limits.cpu_seconds), str(self._started.fileno()))
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # noqa: PTH109
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "declutr.pipeline.media.child", *given],
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
        found: list[Answer] = []
        while len(found) < number and (answer := read_answer(cast(BinaryIO, self._process.stdout))) is not None:
            found.append(answer)
        return found

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
        found: dict[int, Answer] = {}
        while left:
            assert self._child is not None
            answers = self._child.answers(len(left))
            found |= zip(left, answers, strict=False)
            left, before = left[len(answers) :], left
            if not left:
                break
            first = self._child.num_batches == 1
            status, place = self._child.end(ending=True)
            self._child, last = None, before[place]
            left.remove(last)
            # Earlier files of a process must not decide, so the file comes first in a new one.
            if status == -signal.SIGPROF or (first and place == 0):
                found[last] = self._verdict(status)
            else:
                left.insert(0, last)
            self.send([files[number] for number in left])
        self._files = ()
        return [found[number] for number in range(len(files))]

    def _verdict(self, status: int) -> Answer:
        """The failure of a file at which the process ended."""
        if status == -signal.SIGPROF:
            return FAILED, TOO_SLOW, f"decoding it takes more than {self._limits.cpu_seconds:g} s of the processor"
        if status == OUT_OF_MEMORY:
            return FAILED, TOO_MUCH_MEMORY, f"decoding it takes more than {self._limits.memory_mib} MiB of memory"
        if -status in _CRASHES:
            return FAILED, "undecodable", f"its decoder ended with {signal.Signals(-status).name}"
        raise OSError(f"the process that decodes images and clips ended with status {status}; is memory short?")
