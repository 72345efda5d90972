"""Settings of workers, devices and failures. Few imports, so that Ray can start before the rest is loaded."""

import os
from typing import Annotated, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict

ON_GPUS = (
    "its sums are several thousand small kernels, which would take .5 to .7 s of a step on a GPU (computed, not "
    "measured); set device=cpu, or elastic_determinism=false (then equal numbers of workers have equal bits)"
)


class ScalingConfig(Strict):
    """Workers, devices and failures, without influence on the batches."""

    num_workers: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = 1
    """Training processes, one a GPU. `[least, most]`: as many as fit on the cluster. On this machine at most four a
    CPU. 0: in the command's process, without Ray and without restarts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if every worker has one at the first start, else CPUs. cpu: CPUs. cuda: GPUs, also of later nodes. A
    run keeps its device."""
    cpus_per_worker: int = Field(default=1, ge=1)
    """CPUs of a worker; without a GPU also its threads."""
    address: str | None = None
    """Address of a Ray cluster; null: RAY_ADDRESS, else this machine."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer state (FSDP2), for encoders too large for one device."""
    deterministic: bool = True
    """Algorithms that repeat their bits on one kind of GPU (docs/evidence/gpu.md); false: faster. CPUs always repeat
    them."""
    experimental: bool = False
    """On GPUs in half precision, untimed: this project's attention kernel without attention dropout too; without FSDP
    one product for queries, keys and values, weights cast once a step, norms in half precision."""
    elastic_determinism: bool = False
    """The same bits with any number of workers, with more time, memory and exchange. On CPUs alone."""
    deterministic_chunk_documents: int | None = Field(default=None, ge=1)
    """Documents of a microbatch with `elastic_determinism`; the bits depend on it. null: a sixteenth of
    `batch_documents`."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Sum of gradients over workers. fp32: float32. bf16: bfloat16, half the bytes."""
    elastic_resize_interval_seconds: float = Field(default=60.0, gt=0)
    """Seconds between checks whether `[least, most]` workers can grow."""
    max_failures: int = Field(default=100, ge=0)  # hosts of a spot market go all day: a few would end a week's run
    """Most restarts after failures, not counting announced ends of nodes."""
    max_repeated_failures: int = Field(default=3, ge=1)
    """Equal failures in a row at one step that end the run."""
    restart_backoff_seconds: float = Field(default=2.0, ge=0)  # Ray's own retries have no pause
    """Seconds before a second restart at one step; doubled each time, up to a minute."""
    watchdog_timeout_seconds: float = Field(default=600.0, ge=1)
    """Restart workers after this many seconds without progress; exceed the longest step, validation and save."""
    shutdown_grace_seconds: float = Field(default=25.0, gt=0)
    """Seconds to finish the step and save after SIGTERM or Ctrl-C."""
    spot_notices: Literal["aws", "gcp"] | None = None  # no run asks an address that its user did not choose
    """Cloud that is asked for the end of a spot host; workers then save. null: not asked."""
    data_cpus: int = Field(default=2, ge=1)
    """CPUs that read shards, on this machine."""

    @property
    def num_cpus(self) -> int:
        """CPUs of a session on this machine, for the workers and the tasks that read shards."""
        # With fewer than the workers reserve, they would wait for a CPU that never becomes free.
        return max(self.most_workers * self.cpus_per_worker + self.data_cpus, os.cpu_count() or 1)

    @property
    def local(self) -> bool:
        """True if the worker is the process of the command."""
        return self.num_workers == 0

    @property
    def least_workers(self) -> int:
        """Least number of workers."""
        return max(1, self.num_workers) if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        """Largest number of workers."""
        return max(1, self.num_workers) if isinstance(self.num_workers, int) else self.num_workers[1]

    @model_validator(mode="after")
    def _range(self) -> "ScalingConfig":
        if self.least_workers > self.most_workers:
            raise ValueError(f"num_workers = {list(self.num_workers)}: the first number must not exceed the second")  # type: ignore[arg-type]
        if self.local and (self.address or self.fsdp or self.spot_notices):
            raise ValueError(
                "num_workers = 0 trains without Ray: address, fsdp and spot_notices have no effect; remove them, or "
                "set num_workers to 1 or more"
            )
        if self.deterministic_chunk_documents is not None and not self.elastic_determinism:
            raise ValueError(
                f"deterministic_chunk_documents = {self.deterministic_chunk_documents} has no effect without "
                "elastic_determinism = true; remove it"
            )
        if self.elastic_determinism and not self.deterministic:
            raise ValueError("elastic_determinism = true needs deterministic = true; set one of them")
        if self.elastic_determinism and self.device == "cuda":
            raise ValueError(f"elastic_determinism = true: {ON_GPUS}")
        for name, value in (("elastic_determinism", self.elastic_determinism), ("fsdp", self.fsdp)):
            if value and self.reduce_dtype == "bf16":
                raise ValueError(f"reduce_dtype = bf16 has no effect with {name} = true; set it to fp32")
        if self.elastic_determinism and self.fsdp:
            raise ValueError(
                "elastic_determinism = true and fsdp = true exclude each other: sharded gradients are added in an "
                "order that depends on the number of workers; set one of them to false"
            )
        return self
