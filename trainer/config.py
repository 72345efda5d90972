"""The configuration of a training run: composes the branches that live beside the code they configure."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.config import Strict
from common.storage import hash_json
from trainer.model import EncoderConfig
from trainer.objectives import DeclutrConfig, ObjectiveConfig
from trainer.optim import OptimConfig
from trainer.spans import SpanConfig
from trainer.validation import ValidationConfig


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


class CheckpointConfig(Strict):
    """When weights are saved and which are kept: always the last, and the best by `validation.score`."""

    every_steps: int = Field(default=1000, ge=1)
    keep_last: int = Field(default=1, ge=1)


class TrainConfig(Strict):
    """One training run."""

    run: str
    """Folder of the run: checkpoints, metrics, export. The same command continues what is there."""
    data: str
    """Folder of prepared shards."""
    encoder: EncoderConfig
    spans: SpanConfig = SpanConfig()
    objective: ObjectiveConfig = DeclutrConfig()
    optim: OptimConfig = OptimConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    scaling: ScalingConfig = ScalingConfig()
    batch_documents: int = Field(default=16, ge=1)
    """Documents of one optimizer step over all workers: what meets in the contrastive loss."""
    microbatch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Most tokens in one forward; the gradient does not depend on it. None: a worker's whole share at once. auto: as
    much as fits, halved (and the step taken again) whenever memory runs out."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; give this or `epochs`."""
    epochs: float | None = Field(default=None, gt=0)
    """Instead: how often the corpus is read. Without both: 1 epoch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products of the forward in bfloat16; parameters, pooling and losses stay in float32."""
    seed: int = Field(default=0, ge=0)
    """Decides weights, order, spans, masks and dropout."""
    export: Literal["last", "best"] = "last"
    """Which checkpoint becomes the exported encoder."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"give steps = {self.steps} or epochs = {self.epochs}, not both")
        if self.export == "best" and self.validation.every_steps == 0:
            raise ValueError("export = best needs validation.every_steps above 0")
        if self.export == "best" and self.validation.every_steps % self.checkpoint.every_steps:
            raise ValueError(
                f"export = best needs validated checkpoints: validation.every_steps = {self.validation.every_steps} "
                f"must be a multiple of checkpoint.every_steps = {self.checkpoint.every_steps}"
            )
        return self

    @model_validator(mode="after")
    def _what_sharding_allows(self) -> "TrainConfig":
        if self.scaling.shard_parameters and self.microbatch_tokens == "auto":
            raise ValueError(
                "scaling.shard_parameters = True needs a fixed microbatch_tokens, not auto: a worker that runs out of "
                "memory inside a layer would leave the others waiting there; give a number of tokens, or null"
            )
        return self

    def decisive(self) -> dict[str, object]:
        """The part of the configuration that decides the result; a run is continued only if it is unchanged."""
        return self.model_dump(mode="json", exclude={"scaling", "checkpoint", "run", "data", "microbatch_tokens"})

    def hash(self) -> str:
        """Hash of the decisive part."""
        return hash_json(self.decisive())
