"""The configuration of a training run: composes the branches that live beside the code they configure."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config import Strict
from common.storage import hash_json
from common.stores.address import is_remote
from common.suggestions import meant
from pipeline.shards.windows import ShortDocuments
from trainer.checkpoints.settings import CheckpointConfig
from trainer.metrics.settings import FOLLOWED, ValidationConfig
from trainer.model.settings import EncoderConfig
from trainer.objectives.config import RunContext
from trainer.objectives.registry import DEFAULT, AnyObjectiveConfig
from trainer.objectives.span_settings import SpanConfig
from trainer.setup.scaling import ScalingConfig
from trainer.step.settings import OptimConfig


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
    objective: AnyObjectiveConfig = DEFAULT
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
    """Which checkpoint becomes the exported encoder: the last, or the best by `validation.score`."""

    @model_validator(mode="after")
    def _complete_score(self) -> "TrainConfig":
        """Fills in the objective's default score, and leaves it among the settings that the user did not give."""
        known = (*self.objective.scores, FOLLOWED)
        if not self.validation.score:
            completed = self.validation.model_copy(update={"score": known[0]})
            completed.model_fields_set.discard("score")
            self.__dict__["validation"] = completed
        elif self.validation.score not in known:
            raise ValueError(
                f"validation.score = {self.validation.score!r}: it is one of {', '.join(known)}"
                f"{meant(self.validation.score, known)}"
            )
        return self

    @model_validator(mode="after")
    def _what_fits_together(self) -> "TrainConfig":
        found = self._best_problems()
        if self.steps is not None and self.epochs is not None:
            found.append(
                f"give steps = {self.steps} or epochs = {self.epochs}, not both; on a command line epochs=null or "
                "steps=null leaves the other"
            )
        if self.scaling.shard_parameters and self.microbatch_tokens == "auto":
            found.append(
                "scaling.shard_parameters = True needs a fixed microbatch_tokens, not auto: a worker that runs out of "
                "memory inside a layer would leave the others waiting there; give a number of tokens, or null"
            )
        if self.validation.score == FOLLOWED and is_remote(self.run):
            found.append(
                f"validation.score = followed needs a folder as run, not {self.run}: who follows reads that folder. "
                f"Name one that both see, or score on held-out documents ({', '.join(self.objective.scores[:2])})"
            )
        if found:
            raise ValueError("\n".join(found))
        return self

    def _best_problems(self) -> list[str]:
        """What stands against a best checkpoint, which patience needs too."""
        validation, found = self.validation, []
        patience = f"validation.patience = {validation.patience}"
        if validation.patience is not None and self.export == "last":
            found.append(
                f"{patience} needs export = best: when it is at its end, the last weights are those that are no better"
            )
        if (validation.patience is None and self.export == "last") or validation.score == FOLLOWED:
            return found
        who = "export = best" if self.export == "best" else patience
        every_steps = self.checkpoint.every_steps
        if validation.every_steps == 0:
            found.append(f"{who} needs validation.every_steps above 0, or validation.score = followed")
        elif every_steps is None or validation.every_steps % every_steps:
            found.append(
                f"{who} needs validated checkpoints: validation.every_steps = {validation.every_steps} "
                f"must be a multiple of checkpoint.every_steps = {every_steps}"
            )
        return found

    def context(self, short_documents: ShortDocuments) -> RunContext:
        """The part of the run that its objective may depend on.

        Args:
            short_documents: of the shards' manifest.
        """
        return RunContext(self.seed, self.spans, self.batch_documents, short_documents)

    def decisive(self) -> dict[str, object]:
        """The part of the configuration that decides the result; a run is continued only if it is unchanged.

        `on_bad_loss` is no part of it: up to a bad loss it decides nothing, and from there on only `skip` goes on. Nor
        is `validation.patience`: it says where a run ends, not what its steps are.
        """
        places = ("run", "data", "cache")
        free = (*places, "scaling", "checkpoint", "microbatch_tokens", "on_bad_loss", "max_skipped_steps")
        excluded: dict[str, Any] = {**dict.fromkeys(free, True), "validation": {"patience"}}
        if not self.encoder.new_mlm_head:  # a run from before there was this setting had it off
            excluded["encoder"] = {"new_mlm_head"}
        return self.model_dump(mode="json", exclude=excluded)

    def hash(self) -> str:
        """Hash of the decisive part."""
        return hash_json(self.decisive())
