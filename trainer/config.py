"""The configuration of a training run: composes the branches that live beside the code they configure."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.config import Strict
from common.storage import hash_json
from trainer.model import EncoderConfig
from trainer.objectives import DeclutrConfig, ObjectiveConfig
from trainer.optim import OptimConfig
from trainer.scaling import ScalingConfig
from trainer.spans import SpanConfig
from trainer.validation import ValidationConfig


class CheckpointConfig(Strict):
    """When weights are saved and which are kept: always the last, and the best by `validation.score`.

    Files are written beside the training. A storage that fails is tried again while training goes on.
    """

    every_steps: int | None = Field(default=1000, ge=1)
    """Save after these steps; null: by the clock alone."""
    every_seconds: float | None = Field(default=300.0, gt=0)
    """Save when so much time has gone by since the last time: what a killed run loses; null: by steps alone."""
    keep_last: int = Field(default=2, ge=1)
    """How many of the newest are kept. With 2 there is another one should the newest be damaged."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints of multiples of this are kept for good: milestones, to look at how the encoder came about."""
    patience_seconds: float = Field(default=600.0, ge=0)
    """How long a storage may fail (a full disk, a file system that is gone) before the run ends and says so."""

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


class TrainConfig(Strict):
    """One training run."""

    run: str
    """Folder of the run: checkpoints, metrics, export. Or its address, like s3://bucket/runs/mine, where no folder is
    seen by all hosts. The same command continues what is there."""
    data: str
    """Folder of prepared shards, or the address it was sent to (`declutr push`): each host fetches it once."""
    cache: str = "~/.cache/declutr"
    """Folder of each host for its copies of what lies at addresses. Nothing in it is needed for good."""
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
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """What to do when a loss or its gradient is not finite. skip: leave that step's update out and go on with the next
    documents. A run that stopped may be continued with `skip`."""
    max_skipped_steps: int = Field(default=10, ge=1)
    """With `skip`: how many in a row. One more stops the run: it is no accident of a batch any more."""
    export: Literal["last", "best"] = "last"
    """Which checkpoint becomes the exported encoder."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"give steps = {self.steps} or epochs = {self.epochs}, not both")
        if self.export == "best" and self.validation.every_steps == 0:
            raise ValueError("export = best needs validation.every_steps above 0")
        every_steps = self.checkpoint.every_steps
        if self.export == "best" and (every_steps is None or self.validation.every_steps % every_steps):
            raise ValueError(
                f"export = best needs validated checkpoints: validation.every_steps = {self.validation.every_steps} "
                f"must be a multiple of checkpoint.every_steps = {every_steps}"
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
        """The part of the configuration that decides the result; a run is continued only if it is unchanged.

        `on_bad_loss` is no part of it: up to a bad loss it decides nothing, and from there on only `skip` goes on.
        """
        free = {"scaling", "checkpoint", "run", "data", "cache", "microbatch_tokens"}
        return self.model_dump(mode="json", exclude=free | {"on_bad_loss", "max_skipped_steps"})

    def hash(self) -> str:
        """Hash of the decisive part."""
        return hash_json(self.decisive())
