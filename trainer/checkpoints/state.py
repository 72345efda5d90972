"""What a run must remember beside its weights: one record, from which the rest is computed."""

from pathlib import Path

import msgspec
from pydantic import Field

from common.config import Strict
from common.records import DamagedError, read_record
from common.storage import hash_json

FORK = "fork.json"
"""The file of a forked run that names its origin."""


class RunState(Strict):
    """The state of a run after a step. The place in the data follows from `step` alone (trainer/data/plan.py)."""

    step: int = Field(ge=1)
    """Optimizer steps done."""
    documents: int = Field(ge=0)
    """Documents read so far, over all ranks and epochs."""
    world_size: int = Field(ge=1)
    """Workers that took the last step; a resume may use another number."""
    config_hash: str
    """Of everything in the configuration that decides the result."""
    data_hash: str
    """Of the shards' manifest."""
    scores: dict[str, float]
    """Held-out scores of these weights; empty when they were not validated."""
    files: dict[str, str]
    """Checksum of each other file of the checkpoint (trainer/checkpoints/tensorfile.py)."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """Bytes of each of these files."""
    skipped: int = Field(default=0, ge=0)
    """Steps so far whose loss was not finite and whose update was left out (`on_bad_loss`)."""
    skipped_in_a_row: int = Field(default=0, ge=0)
    """How many of them were the last ones."""

    @property
    def identity(self) -> str:
        """Of the checkpoint: a step that was taken again with other weights is another one."""
        return hash_json(self.files)


class Origin(msgspec.Struct, frozen=True):
    """The place a forked run comes from, as `fork.json` names it."""

    folder: str = msgspec.field(name="from")
    """Of the old run, absolute."""
    step: int
    """At which the new run began."""


def read_origin(run: Path) -> Origin | None:
    """The origin of a run; None where it is no fork.

    Raises:
        DamagedError: the file is there, but is not what a fork writes.
    """
    path = run / FORK
    if not path.is_file():
        return None
    try:
        return read_record(path, Origin)
    except DamagedError as error:
        raise DamagedError(
            f'{error}. It names the origin of the run: write {{"from": "OLD_RUN", "step": STEP}} into it, or fork again'
        ) from error
