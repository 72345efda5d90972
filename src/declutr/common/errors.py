"""Errors that a command answers with one sentence and the exit status 1; everything else is a fault of this code.

Each has a message for people: the setting, option or file, its value, the limit, and what to do.
"""

from collections.abc import Sequence

from declutr.common.credentials import redact


class DeclutrError(Exception):
    """Base of all errors of this package."""


class ConfigError(DeclutrError, ValueError):
    """All problems of a configuration, one line each: key, value, limit, remedy."""

    def __init__(self, title: str, problems: Sequence[str]) -> None:
        self.problems = [redact(problem) for problem in problems]
        super().__init__("\n".join([f"{title}: {len(self.problems)} problem(s)", *(f"  - {p}" for p in self.problems)]))


class UsageError(DeclutrError, ValueError):
    """An argument, option, setting or path that cannot be used here."""


class DataError(DeclutrError, ValueError):
    """Data of an evaluation or of the user that are missing or cannot be read."""


class MissingDataError(DataError):
    """A task has no data files."""


class ShardError(DeclutrError, ValueError):
    """Shards that are missing, damaged, or different from their manifest."""


class EncoderError(DeclutrError, ValueError):
    """A folder, file or name that cannot be loaded, trained or exported as an encoder."""


class CheckpointError(DeclutrError, ValueError):
    """A checkpoint that is incomplete, altered, or does not fit the run."""


class UnreadableError(CheckpointError):
    """A checkpoint that the storage failed to read; it may be intact."""


class SaveError(DeclutrError, RuntimeError):
    """Checkpoints can no longer be written."""


class DamagedError(DeclutrError, ValueError):
    """A file whose content differs from what the project writes, or is beyond a bound of size or kind."""


class RunLockedError(DeclutrError, RuntimeError):
    """Another command holds this folder."""


class SessionError(DeclutrError, RuntimeError):
    """No Ray session could be started on this machine."""


class RemoteError(DeclutrError, OSError):
    """A file or folder that cannot be sent or fetched; the message names it, the cause and a remedy."""


class AlteredError(RemoteError):
    """Remote content that is missing or differs from what was sent; a retry does not help."""


class TrainingFailedError(DeclutrError, RuntimeError):
    """The run failed before its last step; saved checkpoints are kept, and the same command continues."""


class RunStoppedError(DeclutrError, RuntimeError):
    """The run stopped on request; the same command continues it.

    Attributes:
        status: exit status of the command.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
