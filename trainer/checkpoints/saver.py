"""Writes checkpoints alongside the training: a copy in memory, a thread that writes it, retries when storage fails.

Only rank 0 has a saver. The training thread copies the tensors between two steps (`reuse_memory`, `submit`) and
continues. The writer makes the checkpoint; when the storage fails it retries, with the newest copy.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from declutr.common.console.logs import get_logger
from declutr.common.errors import RemoteError, SaveError
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import Contents
from declutr.trainer.checkpoints.state import XXH3, CheckpointConfig, RunState

_BACK_OFF_SECONDS = (0.5, 15.0)
_MIB = 2**20
_NICENESS = 10  # at 19 a write takes five times as long, for little (docs/evidence/log.md)
_UNHURRIED_SECONDS = 60.0  # a write that takes longer hangs
_BEAT_SECONDS = 1.0  # between two looks: a storage that hangs notifies nobody


@dataclass(frozen=True)
class Job:
    """A checkpoint to write: the run's state and a copy of its tensors."""

    state: RunState
    contents: Contents


class Saver:
    """Writes and prunes the checkpoints of a run in a thread.

    `reuse_memory`, `wait` and `check` raise SaveError once the storage has failed for longer than the settings allow.
    """

    def __init__(
        self,
        folder: Path,  # folder of the run's checkpoints
        # when to save (`every_steps` is a number), which checkpoints to keep, and the time a storage may fail.
        config: CheckpointConfig,
        score: str,  # score that decides the best checkpoint
        # called before each checkpoint is made, to write files that must not be older than a checkpoint. Its OSError
        # counts as a failure of the checkpoint.
        before: Callable[[], None] = lambda: None,
        # called with the step of each written checkpoint, and again after an OSError, which counts as a failure of the
        # checkpoint.
        after: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,  # monotonic clock, in seconds
    ) -> None:
        self.folder = folder
        self.config = config
        self.score = score
        self.written: int | None = None  # step of the newest checkpoint that is written, also to the run's store
        self._before, self._after = before, after
        self._clock = clock
        self._saved_at = clock()
        self._changed = threading.Condition()  # guards the fields below
        self._job: Job | None = None  # None once it is written
        self._saved_job: Job | None = None  # the last one whose checkpoint is in the folder
        self._memory: Contents | None = None
        self._writing_since: float | None = None
        self._pausing = False  # between two attempts
        self._waited_for: Job | None = None
        self._closed = False
        self._failure: str | None = None
        self._error: BaseException | None = None
        self._failing_since: float | None = None  # of the writer alone, as the next two; None after a success
        self._tries = 0
        self._errno: int | None = None  # of the newest failure
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def due(self, step: int, needed: bool = False) -> bool:
        """True if a checkpoint of this step is due and can be taken now; one that is `needed` is always due.

        A checkpoint that is due by its step waits while the previous one is being written, so that the speed of the
        disk does not decide which steps have one. It is left out if the storage hangs, unless it is `needed`.
        """
        config = self.config
        by_step = needed or any(every and step % every == 0 for every in (config.every_steps, config.keep_every_steps))
        by_clock = config.every_seconds is not None and self._clock() - self._saved_at >= config.every_seconds
        if not (by_step or by_clock):
            return False
        if needed:
            with contextlib.suppress(SaveError):  # `failed` tells the other workers
                self._wait(lambda: not self._busy())
        with self._changed:
            if by_step and self._busy() and self._waited_for is not self._job:
                self._waited_for = self._job
                if not self._changed.wait_for(lambda: not self._busy(), _UNHURRIED_SECONDS):
                    get_logger().warning(
                        "the checkpoint before step %d is still being written: skipping this one", step
                    )
            return not self._busy()

    def reuse_memory(self) -> Contents | None:
        """Returns memory for the next copy. A checkpoint in it that is waiting for a retry is dropped."""
        with self._changed:  # until the memory is taken, or the writer could take it for a retry
            self._wait(lambda: not self._busy())
            self._job = None
            memory, self._memory = self._memory, None
            return memory

    def submit(
        self,
        state: RunState,  # state of the run at the same step
        contents: Contents,  # tensors from `weights.collect`; do not change them until `reuse_memory` returns them
    ) -> None:
        """Passes a copy to the writer."""
        self._saved_at = self._clock()
        with self._changed:
            self._memory = contents
            self._job = Job(state, contents)
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until the submitted checkpoint is written."""
        self._wait(lambda: self._job is None)

    def failed(self) -> bool:
        """True if the storage has failed, or hung without an error, for longer than the settings allow."""
        since = self._writing_since
        if since is not None and self._failure is None and self._clock() - since > self.config.storage_retry_seconds:
            self._failure = (
                f"the storage of {self.folder} has not finished a checkpoint for {self._clock() - since:.0f} s"
            )
        return self._failure is not None or self._error is not None

    def check(self) -> None:
        """Raises the error of the writer, if any."""
        if self.failed():
            raise self._error or SaveError(f"{self._failure}. See checkpoint.storage_retry_seconds")

    def close(self) -> None:
        """Ends the thread after the last submitted checkpoint, unless the storage fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive() and not self.failed():
            self._thread.join(_BEAT_SECONDS)

    def _busy(self) -> bool:
        """True while the writer needs the copy; between two attempts a newer copy may replace it."""
        return self._job is not None and not self._pausing

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: until() or self.failed(), _BEAT_SECONDS):
                pass
        self.check()

    def _run(self) -> None:
        _lower_priority()
        try:
            while (job := self._next()) is not None:
                try:
                    self._write(job)
                except OSError as error:
                    if not self._wait_out(job, error):
                        return
                else:
                    self._done(job)
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            with self._changed:
                self._error, self._writing_since = error, None
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._closed)
            if self._job is not None:
                self._writing_since, self._pausing = self._clock(), False
            return self._job

    def _write(self, job: Job) -> None:
        if job is not self._saved_job:  # otherwise only `after` failed
            self._before()
            try:
                for left in self.folder.glob(".step-*.tmp"):  # no other writer runs now; the write may need their room
                    shutil.rmtree(left)
            except OSError as error:
                get_logger().warning("remains of a killed writer in %s stay (%s)", self.folder, error.strerror)
            checkpoint.save(self.folder, job.state, job.contents)
            self._saved_job = job
            try:
                checkpoint.prune(self.folder, self.config, self.score, job.state.step)
            except OSError as error:  # the next checkpoint deletes them
                get_logger().warning("old checkpoints in %s cannot be deleted now (%s)", self.folder, error.strerror)
        if self._after is not None:
            self._after(job.state.step)

    def _done(self, job: Job) -> None:
        if self._failing_since is not None:
            message = "the checkpoint of step %d is written, after %d attempts in %.0f s"
            get_logger().info(message, job.state.step, self._tries + 1, self._clock() - self._failing_since)
        self._failing_since, self._tries, self._errno = None, 0, None
        with self._changed:
            self._writing_since = None
            self.written = job.state.step
            if self._job is job:
                self._job = None
            self._changed.notify_all()

    def _wait_out(self, job: Job, error: OSError) -> bool:
        """Pauses after a failure; False means give up. A newer copy may replace this one during the pause."""
        pause = self._pause_after(job, error)
        with self._changed:
            self._writing_since, self._pausing = None, True
            if pause is None:
                self._failure = self._message(job, error)
            self._changed.notify_all()
            return pause is not None and not self._changed.wait_for(lambda: self._closed, pause)

    def _pause_after(self, job: Job, error: OSError) -> float | None:
        """Seconds until the next attempt, or None if the time limit is reached. Logs an error that is new."""
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        left = self._failing_since + self.config.storage_retry_seconds - now
        if left <= 0:
            return None
        if self._tries == 0 or error.errno != self._errno:
            get_logger().warning("%s. Training continues; retrying for %.0f s", self._message(job, error), left)
        self._tries, self._errno = self._tries + 1, error.errno
        shortest, longest = _BACK_OFF_SECONDS
        return min(longest, left, shortest * 2.0 ** (self._tries - 1))

    def _message(self, job: Job, error: OSError) -> str:
        """Names the error, the space needed and the free space."""
        if isinstance(error, RemoteError):  # the free space here does not matter
            return f"the checkpoint of step {job.state.step} cannot be sent ({error})"
        needed = sum(tensor.nbytes for file in job.contents.values() for tensor in file.values()) / _MIB
        try:
            free = f"{shutil.disk_usage(self.folder.parent).free / _MIB:.1f} MiB are free"
        except OSError:
            free = "the free space is unknown"
        return (
            f"the checkpoint of step {job.state.step} cannot be written to {self.folder} ({error.strerror or error}): "
            f"it needs {needed:.1f} MiB, {free}"
        )


def _lower_priority() -> None:
    """Gives the training priority for cores; on Linux each thread has a separate niceness."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))


# A safetensors file and its checksum, written in one pass alongside a training thread. The safetensors library
# copies all tensors into one string first, holds Python's global lock while it writes, reports a full disk as text
# without an errno, and needs a second pass for the checksum. It is used for reading. The checksum is XXH3 (128
# bits): SHA-256 took most of the time that a checkpoint slows the training without a spare core. XXH3 detects damage
# by disks and networks; anyone who could forge it could change state.json too.


# safetensors' names, in its order of tensors: largest alignment first, then by name
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_CHUNK_BYTES = 16 * 2**20


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes contiguous CPU tensors to a new file that `safetensors.torch.load_file` reads; flushes it to the disk.

    Each chunk is written to the disk and dropped from the page cache. Otherwise a checkpoint would displace the shards
    in use, and new pages for a gigabyte cost more than writing it. The checksum is that of the tensors in memory, not
    of the bytes on the disk.
    """
    names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    digest = xxhash.xxh3_128()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        written = _write(handle, memoryview(_header(names, tensors)), digest, 0)
        for name in names:
            written = _write(handle, tensors[name].reshape(-1).view(torch.uint8).numpy().data, digest, written)
        os.fsync(handle)
        size = os.fstat(handle).st_size
        if size != written:
            raise OSError(f"{path} holds {size} bytes after {written} were written")
    finally:
        os.close(handle)
    return XXH3 + digest.hexdigest()


def _header(names: list[str], tensors: Mapping[str, Tensor]) -> bytes:
    entries, at = {}, 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _write(handle: int, raw: memoryview, digest: xxhash.xxh3_128, at: int) -> int:
    """Writes at an offset and returns the next one. Hashing and writing release Python's lock for the training."""
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        done = 0
        while done < len(chunk):
            done += os.write(handle, chunk[done:])  # a nearly full disk takes a part
        if len(chunk) == _CHUNK_BYTES:  # smaller pieces wait for the last fsync
            os.fdatasync(handle)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, at, len(chunk), os.POSIX_FADV_DONTNEED)
        at += len(chunk)
    return at
