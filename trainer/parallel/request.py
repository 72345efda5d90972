"""What workers request of each other between two steps, without torch."""

import enum


class Request(enum.IntFlag):
    """A worker's requests between two steps; all workers carry out what any of them requests."""

    SAVE = 1
    """Save a checkpoint of the step just taken."""
    STOP = 2
    """Save and stop: a signal came, or a machine is about to be removed."""
    FAIL = 4
    """Stop without a checkpoint, because checkpoints cannot be written."""
    EARLY = 8
    """Save and end the run, because its scores no longer improve."""
    REPORT = 16
    """Report a written checkpoint to Ray Train."""
