"""Requests of workers to each other once a step, without torch."""

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Request(enum.IntFlag):
    """A worker's requests in a step; all workers carry out what any of them requests."""

    SAVE = 1
    """Save a checkpoint of the step."""
    STOP = 2
    """Save and stop: a signal came, or a machine is about to be removed."""
    FAIL = 4
    """Stop without a checkpoint, because checkpoints cannot be written."""
    EARLY = 8
    """Save and end the run, because its scores no longer improve."""
    REPORT = 16
    """Report a written checkpoint to Ray Train."""
    MEMORY = 32
    """Repeat the step with smaller microbatches, because memory ran out."""


@dataclass
class Agreement:
    """Requests that travel with the exchange in which workers agree whether a step fitted their memory.

    Attributes:
        requests: returns this worker's requests.
        agreed: the requests of all workers; None before the exchange, and with one worker.
    """

    requests: Callable[[], Request]
    agreed: Request | None = None
