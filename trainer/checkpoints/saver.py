"""Checkpoints written beside the training: one copy in memory, a thread that writes it, patience with the storage.

Only rank 0 has a saver. The training thread copies the tensors between two steps (`reuse_memory`, `submit`) and
continues. The writer makes the checkpoint; when the storage fails it retries, with the newest copy.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common.console.logs import get_logger
from trainer.checkpoints import checkpoint, retention
from trainer.checkpoints.checkpoint import Contents
from trainer.checkpoints.retry import Job, StorageRetry
from trainer.checkpoints.settings import CheckpointConfig
from trainer.checkpoints.state import RunState

_NICENESS = 10
_UNHURRIED_SECONDS = 60.0
_BEAT_SECONDS = 1.0


class SaveError(RuntimeError):
    """Checkpoints could not be written for longer than the settings allow."""


class Saver:
    """Writes, verifies and prunes the checkpoints of a run in a thread of its own.

    Args:
        folder: of the run's checkpoints.
        config: when, how many, and how long a storage may fail.
        score: by which the best is kept.
        before: called before each checkpoint is made; what it writes shall never lie behind a checkpoint. May raise
            OSError, which counts as the checkpoint's.
        after: called with the step of each checkpoint that is written, again if it raises OSError, which counts as the
            checkpoint's.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        score: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[int], None] = lambda step: None,  # noqa: ARG005 - nobody wants to know
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.config = config
        self.score = score
        self._before, self._after = before, after
        self._clock = clock
        self._saved_at = clock()
        self._changed = threading.Condition()  # guards what follows
        self._job: Job | None = None  # until it is written
        self._made: Job | None = None  # the last one whose checkpoint lies in the folder
        self._memory: Contents | None = None
        self._writing_since: float | None = None
        self._pausing = False  # between two tries
        self._waited_for: Job | None = None
        self._closed = False
        self._failure: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Is it time for a checkpoint of this step, and can it be taken now?

        A checkpoint that falls due by its step while the one before is being written waits for it, so that the speed of
        a disk does not decide which steps have one. On a storage that hangs it is left out.
        """
        config = self.config
        by_step = config.every_steps is not None and step % config.every_steps == 0
        by_clock = config.every_seconds is not None and self._clock() - self._saved_at >= config.every_seconds
        if not (by_step or by_clock):
            return False
        with self._changed:
            if by_step and self._busy() and self._waited_for is not self._job:
                self._waited_for = self._job
                if not self._changed.wait_for(lambda: not self._busy(), _UNHURRIED_SECONDS):
                    get_logger().warning("the checkpoint before step %d is still being written: going on without", step)
            return not self._busy()

    def reuse_memory(self) -> Contents | None:
        """Memory for the next copy; what is in it is lost, also to a writer that would have tried again.

        Raises:
            SaveError: the storage was given up.
        """
        self._wait(lambda: not self._busy())
        with self._changed:
            self._job = None
            memory, self._memory = self._memory, None
            return memory

    def submit(self, state: RunState, contents: Contents) -> None:
        """Hands a copy over to the writer.

        Args:
            state: of the run, of the same step.
            contents: from `checkpoint.collect`; not to be touched before it is lent again.
        """
        self._saved_at = self._clock()
        with self._changed:
            self._memory = contents
            self._job = Job(state, contents)
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns when everything that was given is written.

        Raises:
            SaveError: the storage was given up.
        """
        self._wait(lambda: self._job is None)

    def failed(self) -> bool:
        """Was the storage given up? Also one that neither writes nor says that it cannot."""
        since = self._writing_since
        if since is not None and self._failure is None and self._clock() - since > self.config.patience_seconds:
            self._failure = (
                f"the storage of {self.folder} has not finished a checkpoint for {self._clock() - since:.0f} s"
            )
        return self._failure is not None or self._error is not None

    def check(self) -> None:
        """Tells what became of the writer.

        Raises:
            SaveError: the storage was given up.
        """
        if self.failed():
            raise self._error or SaveError(f"{self._failure}. See checkpoint.patience_seconds")

    def close(self) -> None:
        """Ends the thread after the checkpoint that was given last, unless the storage fails."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._thread.is_alive() and not self.failed():
            self._thread.join(_BEAT_SECONDS)

    def _busy(self) -> bool:
        """Must the copy be left to the writer? Not between two tries: a newer one is better."""
        return self._job is not None and not self._pausing

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: until() or self.failed(), _BEAT_SECONDS):
                pass
        self.check()

    def _run(self) -> None:
        _lower_priority()
        retry = StorageRetry(self.folder, self.config.patience_seconds, self._clock)
        try:
            while (job := self._next()) is not None:
                try:
                    self._write(job)
                except OSError as error:
                    if not self._wait_out(retry, job, error):
                        return
                else:
                    retry.over(job)
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
        if job is not self._made:  # else it was `after` that failed
            self._before()
            checkpoint.save(self.folder, job.state, job.contents)
            self._made = job
            try:
                retention.prune(self.folder, self.config, self.score, job.state.step)
            except OSError as error:  # what should be gone is still there: the next one deletes it
                get_logger().warning("old checkpoints in %s cannot be deleted now (%s)", self.folder, error.strerror)
        self._after(job.state.step)

    def _done(self, job: Job) -> None:
        with self._changed:
            self._writing_since = None
            if self._job is job:
                self._job = None
            self._changed.notify_all()

    def _wait_out(self, retry: StorageRetry, job: Job, error: OSError) -> bool:
        """Pauses after a failure, or gives up; answers whether to go on. Meanwhile the copy may be replaced."""
        pause = retry.failed(job, error)
        with self._changed:
            self._writing_since, self._pausing = None, True
            if pause is None:
                self._failure = retry.message(job, error)
            self._changed.notify_all()
            return pause is not None and not self._changed.wait_for(lambda: self._closed, pause)


def _lower_priority() -> None:
    """Lets the training go first where both want a core; on Linux every thread has a niceness of its own."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
