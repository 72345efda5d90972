"""A time in which a storage fails: how long it may last, when to try again, and what a person is told."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.console.logs import get_logger
from common.stores.retry import RemoteError
from trainer.checkpoints.checkpoint import Contents
from trainer.checkpoints.state import RunState
from trainer.checkpoints.tensorfile import num_bytes

_BACK_OFF_SECONDS = (0.5, 15.0)
_MIB = 2**20


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written: the run's state and a copy of its tensors."""

    state: RunState
    contents: Contents


class Outage:
    """Counts the failures of a storage until it is back.

    Args:
        folder: where checkpoints go.
        patience_seconds: how long it may fail.
        clock: monotonic, in seconds.
    """

    def __init__(self, folder: Path, patience_seconds: float, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.patience_seconds = patience_seconds
        self.clock = clock
        self.since: float | None = None
        self.tries = 0
        self.number: int | None = None

    def failed(self, job: Job, error: OSError) -> float | None:
        """Seconds until the next try; None: patience is at its end. A line in the log where the error is a new one."""
        now = self.clock()
        self.since = now if self.since is None else self.since
        left = self.since + self.patience_seconds - now
        if left <= 0:
            return None
        if self.tries == 0 or error.errno != self.number:
            get_logger().warning("%s. Training goes on; trying again for %.0f s", self.words(job, error), left)
        self.tries, self.number = self.tries + 1, error.errno
        shortest, longest = _BACK_OFF_SECONDS
        return min(longest, left, shortest * 2.0 ** (self.tries - 1))

    def over(self, job: Job) -> None:
        """The storage is back."""
        if self.since is not None:
            words = "the checkpoint of step %d is written, after %d tries in %.0f s"
            get_logger().info(words, job.state.step, self.tries + 1, self.clock() - self.since)
        self.since, self.tries, self.number = None, 0, None

    def words(self, job: Job, error: OSError) -> str:
        """What failed, what is needed, what is free."""
        if isinstance(error, RemoteError):
            return f"the checkpoint of step {job.state.step} cannot be sent ({error})"
        needed = sum(map(num_bytes, job.contents.values())) / _MIB
        try:
            free = f"{shutil.disk_usage(self.folder.parent).free / _MIB:.1f} MiB are free"
        except OSError:
            free = "how much is free cannot be told"
        return (
            f"the checkpoint of step {job.state.step} cannot be written to {self.folder} ({error.strerror or error}): "
            f"it needs {needed:.1f} MiB, {free}"
        )
