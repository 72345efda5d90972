"""Where a run runs, and what it survives. Imports little, so that Ray can start before the rest is loaded."""

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.config import Strict


class ScalingConfig(Strict):
    """Where the run runs. Nothing here changes its batches."""

    workers: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = 1
    """Processes that train, one a GPU where GPUs are used. `[least, most]`: as many as the cluster has room for; fewer
    when a node goes, more when one comes, without a new start of the command."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs when the cluster has one for every worker, else CPUs."""
    cpus_per_worker: int = Field(default=1, ge=1)
    """CPUs a worker reserves; on CPU also its threads."""
    address: str | None = None
    """A running Ray cluster; None: RAY_ADDRESS if that is set, else a session on this machine."""
    shard_parameters: bool = False
    """Each worker keeps only its part of weights, gradients and optimizer state and gathers a layer when it is needed
    (FSDP2): for encoders that are too large for one device. Same gradient, more exchange; see docs/decisions."""
    resize_seconds: float = Field(default=60.0, gt=0)
    """How often a group of `[least, most]` workers looks for room to grow. Growing starts the group again from the last
    checkpoint: what was done since is done again."""
    max_failures: int = Field(default=100, ge=0)
    """How often the workers are started again after a failure, in all. Nodes that are taken away do not count."""
    same_failures: int = Field(default=3, ge=1)
    """The run ends when the same failure occurs so often in a row at the same step: it would occur again."""
    back_off_seconds: float = Field(default=2.0, ge=0)
    """Pause before the second start after failures without progress, doubled each time, at most a minute. The first
    start after a failure follows at once."""
    hang_seconds: float = Field(default=600.0, ge=1)
    """A group whose workers make no progress for so long is started again, and the worker that holds it up is named.
    Longer than the longest step, validation and save."""
    slow_factor: float = Field(default=2.0, gt=1)
    """A worker whose own time for a step is so many times the others' is named in the log."""
    stop_seconds: float = Field(default=25.0, gt=0)
    """After SIGTERM or Ctrl-C: how long the workers have to finish their step and save. Kubernetes kills after 30 s."""
    storage_threads: int = Field(default=2, ge=1)
    """CPUs for the tasks that read shards, on a session on this machine."""

    @property
    def num_cpus(self) -> int:
        """CPUs of a session on this machine: for the workers, and for the tasks that read for them."""
        return max(self.most_workers * self.cpus_per_worker + self.storage_threads, os.cpu_count() or 1)

    @property
    def least_workers(self) -> int:
        """The fewest workers the run goes on with."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most_workers(self) -> int:
        """The most workers the run uses."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @model_validator(mode="after")
    def _range(self) -> "ScalingConfig":
        if self.least_workers > self.most_workers:
            raise ValueError(f"workers = {list(self.workers)}: the first is the least, the second the most")  # type: ignore[arg-type]
        return self
