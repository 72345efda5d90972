"""What a run must remember beside its weights: one record, from which the rest is computed."""

from pydantic import Field

from common.config import Strict
from common.storage import hash_json


class RunState(Strict):
    """The state of a run after a step. The place in the data follows from `step` alone (trainer/plan.py)."""

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
    """Checksum of each other file of the checkpoint (trainer/tensorfile.py)."""
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
