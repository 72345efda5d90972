"""What a run must remember beside its weights: one record, from which the rest is computed."""

from common.config import Strict


class RunState(Strict):
    """The state of a run after a step. The place in the data follows from `step` alone (trainer/plan.py)."""

    step: int
    """Optimizer steps done."""
    documents: int
    """Documents read so far, over all ranks and epochs."""
    world_size: int
    """Workers that took the last step; a resume may use another number."""
    config_hash: str
    """Of everything in the configuration that decides the result."""
    data_hash: str
    """Of the shards' manifest."""
    scores: dict[str, float]
    """Held-out scores of these weights; empty when they were not validated."""
    files: dict[str, str]
    """SHA-256 of each other file of the checkpoint."""
