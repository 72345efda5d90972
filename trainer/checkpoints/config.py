"""Settings of checkpoints, readable without torch."""

from pydantic import Field, model_validator

from declutr.common.config import Strict
from declutr.trainer.metrics.config import Interval, steps_between


class CheckpointConfig(Strict):
    """Times of saves and checkpoints to keep; the last and the best by `validation.score` are always kept.

    A thread writes the files while training continues. It retries when the storage fails.
    """

    every_steps: Interval | None = 0.05
    """Save every N steps. Below 1: a share of the run. null: by the clock alone."""
    every_seconds: float | None = Field(default=300.0, gt=0)
    """Save when this much time has passed since the last save; a killed run loses no more. null: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep; with 2, an older one remains if the newest is damaged."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Save at all multiples of this step and keep these checkpoints permanently."""
    storage_retry_seconds: float = Field(default=600.0, ge=0)
    """Time that a storage may fail (full disk, missing file system) before the run ends."""

    @model_validator(mode="after")
    def _some_time(self) -> "CheckpointConfig":
        if self.every_steps is None and self.every_seconds is None:
            raise ValueError("give every_steps or every_seconds: with both null nothing is saved before the end")
        if self.every_steps == 0:
            raise ValueError("every_steps = 0: must be above 0; null saves by the clock alone")
        return self

    def in_steps(self, total_steps: int) -> "CheckpointConfig":
        """These settings with `every_steps` as a number of steps, for a run of `total_steps`."""
        if self.every_steps is None:
            return self
        return self.model_copy(update={"every_steps": steps_between(self.every_steps, total_steps)})
