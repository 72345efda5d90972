"""Settings of checkpoints, readable without torch."""

from pydantic import Field, model_validator

from common.config import Strict


class CheckpointConfig(Strict):
    """When weights are saved and which checkpoints are kept; the last and the best by `validation.score` always are.

    A thread writes the files while training continues. It retries when the storage fails.
    """

    every_steps: int | None = Field(default=1000, ge=1)
    """Save after every this many steps; null: by the clock alone."""
    every_seconds: float | None = Field(default=300.0, gt=0)
    """Save when this much time has passed since the last save. A killed run loses at most this much work. null: by
    steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With 2, an older one remains if the newest is damaged."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of all multiples of this step permanently, to study how the encoder developed."""
    patience_seconds: float = Field(default=600.0, ge=0)
    """Time a storage may fail (full disk, missing file system) before the run ends with an error."""

    @model_validator(mode="after")
    def _some_time(self) -> "CheckpointConfig":
        if self.every_steps is None and self.every_seconds is None:
            raise ValueError("give every_steps or every_seconds: with both null nothing is saved before the end")
        if self.keep_every_steps is not None and self.every_steps is None:
            raise ValueError(
                f"keep_every_steps = {self.keep_every_steps} needs every_steps: checkpoints by the clock alone seldom "
                "fall on its multiples"
            )
        if self.keep_every_steps is not None and self.every_steps and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"keep_every_steps = {self.keep_every_steps} must be a multiple of every_steps = {self.every_steps}"
            )
        return self
