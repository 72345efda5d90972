"""Retries while a storage fails: their pauses, their time limit and their log lines."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.errors import RemoteError
from declutr.trainer.checkpoints.checkpoint import Contents
from declutr.trainer.checkpoints.state import RunState

_BACK_OFF_SECONDS = (0.5, 15.0)
_MIB = 2**20


@dataclass(frozen=True)
class Job:
    """A checkpoint to write: the run's state and a copy of its tensors."""

    state: RunState
    contents: Contents


class StorageRetry:
    """Counts the failures of a storage until a write succeeds; it may fail for `storage_retry_seconds`."""

    def __init__(self, folder: Path, storage_retry_seconds: float, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.storage_retry_seconds = storage_retry_seconds
        self.clock = clock
        self.since: float | None = None
        self.tries = 0
        self.number: int | None = None

    def failed(self, job: Job, error: OSError) -> float | None:
        """Seconds until the next attempt, or None if the time limit is reached. Logs an error that is new."""
        now = self.clock()
        self.since = now if self.since is None else self.since
        left = self.since + self.storage_retry_seconds - now
        if left <= 0:
            return None
        if self.tries == 0 or error.errno != self.number:
            get_logger().warning("%s. Training continues; retrying for %.0f s", self.message(job, error), left)
        self.tries, self.number = self.tries + 1, error.errno
        shortest, longest = _BACK_OFF_SECONDS
        return min(longest, left, shortest * 2.0 ** (self.tries - 1))

    def over(self, job: Job) -> None:
        """Resets the count after a successful write."""
        if self.since is not None:
            message = "the checkpoint of step %d is written, after %d attempts in %.0f s"
            get_logger().info(message, job.state.step, self.tries + 1, self.clock() - self.since)
        self.since, self.tries, self.number = None, 0, None

    def message(self, job: Job, error: OSError) -> str:
        """Names the error, the space needed and the free space."""
        if isinstance(error, RemoteError):
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
