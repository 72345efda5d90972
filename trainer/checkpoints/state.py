"""State of a run in addition to its weights: one record, from which everything else is computed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import ConfigDict, Field

from declutr.common.config import Strict
from declutr.common.storage import hash_json
from declutr.pipeline.shards.manifest import Manifest, data_hash

Rows = list[float] | list[list[float]]
"""Values of rows, as in `RowScore`."""
XXH3 = "xxh3:"
"""Prefix of checksums by XXH3."""


class Reported(Strict):
    """Values of the held-out rows that report the result, for weights at the start and after a step."""

    score: str
    """Name of the score."""
    start: Rows
    """Values of the weights with which the run started."""
    rows: Rows
    """Values of the weights of the checkpoint; empty when they were not validated."""


class RunState(Strict):
    """State of a run after a step. The position in the data follows from `step` alone (trainer/data/plan.py)."""

    model_config = ConfigDict(allow_inf_nan=True)  # a measured value may be infinite

    step: int = Field(ge=1)
    """Optimizer steps done."""
    documents: int = Field(ge=0)
    """Documents read so far, over all ranks and epochs."""
    world_size: int = Field(ge=1)
    """Workers that took the last step; a resume may use another number."""
    config_hash: str
    """Hash of all settings that decide the result."""
    data_hash: str
    """Hash of the shards' manifest."""
    task_hashes: dict[str, str] = Field(default_factory=dict)
    """The same of each task; empty if the run has no additional ones."""
    scores: dict[str, float]
    """Held-out scores of these weights; empty when they were not validated."""
    reported: Reported | None = None
    """Scores of the held-out rows that choose nothing; None in runs without scores of rows."""
    files: dict[str, str]
    """Checksum of each other file of the checkpoint (trainer/checkpoints/tensorfile.py)."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """Bytes of each of these files."""
    skipped: int = Field(default=0, ge=0)
    """Number of steps so far that were skipped because their loss was not finite (`on_nonfinite_loss`)."""
    skipped_in_a_row: int = Field(default=0, ge=0)
    """Number of skipped steps directly before and at `step`."""
    tasks_skipped: dict[str, Annotated[list[int], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    """The same two numbers of each auxiliary task with its own update, if it skipped steps."""

    @property
    def identity(self) -> str:
        """Identity of the checkpoint, which differs if a repeated step has different weights."""
        return hash_json(self.files)


def has_checksum(path: Path, checksum: str) -> bool:
    """Compares a file with its checksum.

    Raises:
        OSError: the storage failed.
    """
    with path.open("rb") as stream:
        return XXH3 + hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest() == checksum


def data_hashes(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Identity of each task's data by its name; the main task has the name ""."""
    return {name: data_hash(manifest) for name, manifest in manifests.items()}


def joint_hash(hashes: Mapping[str, str]) -> str:
    """Identity of a run's data, from `data_hashes`."""
    return hashes[""] if len(hashes) == 1 else hash_json(hashes)
