"""State of a run in addition to its weights: one record, from which everything else is computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, model_validator

from declutr.common.config import Strict
from declutr.common.errors import DamagedError
from declutr.common.storage import hash_json, read_record
from declutr.trainer.metrics.config import Interval, steps_between

Rows = list[float] | list[list[float]]  # values of rows, as in `RowScore`
XXH3 = "xxh3:"  # prefix of checksums by XXH3


class Reported(Strict):
    """Values of the held-out rows that report the result, for weights at the start and after a step."""

    score: str  # name of the score
    start: Rows  # values of the weights with which the run started
    rows: Rows  # values of the weights of the checkpoint; empty when they were not validated


class RunState(Strict):
    """State of a run after a step. The position in the data follows from `step` alone (trainer/data/plan.py)."""

    model_config = ConfigDict(allow_inf_nan=True)  # a measured value may be infinite

    step: int = Field(ge=1)  # optimizer steps done
    documents: int = Field(ge=0)  # documents read so far, over all ranks and epochs
    world_size: int = Field(ge=1)  # workers that took the last step; a resume may use another number
    config_hash: str  # hash of all settings that decide the result
    data_hash: str  # hash of the shards' manifest
    # The same of each task; empty if the run has no additional ones.
    task_hashes: dict[str, str] = Field(default_factory=dict)
    scores: dict[str, float]  # held-out scores of these weights; empty when they were not validated
    # Scores of the held-out rows that choose nothing; None in runs without scores of rows.
    reported: Reported | None = None
    files: dict[str, str]  # checksum of each other file of the checkpoint (trainer/checkpoints/saver.py)
    sizes: dict[str, int] = Field(default_factory=dict)  # bytes of each of these files
    # Number of steps so far that were skipped because their loss was not finite (`on_nonfinite_loss`).
    skipped: int = Field(default=0, ge=0)
    skipped_in_a_row: int = Field(default=0, ge=0)  # number of skipped steps directly before and at `step`
    # The same two numbers of each auxiliary task with its own update, if it skipped steps.
    tasks_skipped: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)


def joint_hash(hashes: Mapping[str, str]) -> str:
    """Identity of a run's data, from the hash of each task's shards by its name; the main task has the name ""."""
    return hashes[""] if len(hashes) == 1 else hash_json(hashes)


# The settings of an exported encoder.


EXPORT = "export"
SETTINGS = "declutr.json"
A_PATH = "(a path)"  # Stands for a path or an address in the settings of an export, which others get


class ExportSettings(msgspec.Struct, frozen=True):
    """The part of an export's settings that is read back."""

    step: int  # step of the exported checkpoint
    pooling: str
    verdict: dict[str, Any]  # comparison with the start of the run (trainer/driver/export.py)
    checkpoint: str  # hash of that checkpoint's state, which has the checksums of its files
    config: dict[str, Any]  # settings of the run, without paths and addresses
    files: dict[str, str]  # SHA-256 of every other file of the folder


def read_settings(folder: Path) -> ExportSettings:
    """Reads the settings of an exported encoder."""
    settings = read_record(folder / SETTINGS, ExportSettings)
    raw = read_record(folder / SETTINGS, dict[str, Any])  # the hash is of all keys, also of later versions
    if raw.pop("hash", None) != hash_json(raw):
        raise DamagedError(f"{folder / SETTINGS} is altered (its hash differs)")
    return settings


class CheckpointConfig(Strict):
    """The last and the best checkpoint are always kept.

    A thread writes the files while training continues. It retries when the storage fails.
    """

    every_steps: Interval | None = 0.05
    """Save every N steps; below 1: a share of the run; null: by the clock alone."""
    every_seconds: float | None = Field(default=300.0, gt=0)
    """Seconds from save to save; null: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Save and keep all multiples of this step."""
    storage_retry_seconds: float = Field(default=600.0, ge=0)
    """Seconds of failing storage before the run ends."""

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
