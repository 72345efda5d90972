"""Settings of DeCLUTR and its checks before a run, readable without torch."""

import math
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from declutr.common.config import Strict
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.data.packing import MaskingConfig
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext

# Documents in the paper's batch. With fewer, distinguishing their spans soon becomes too easy (docs/decisions, 18).
_FEW_DOCUMENTS = 16
# Share of the loss of guessing, chosen by judgement. A run that learned nothing started with a loss of 0.117; guessing
# costs 4.14 with the paper's batch.
_EASY_SHARE = 0.1


class NTXentConfig(Strict):
    """NT-Xent (DeCLUTR eq. 1 divided by its 2M terms)."""

    kind: Literal["ntxent"] = "ntxent"
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the cosine similarities."""
    exclude_same_document: bool = False
    """An anchor's own document gives no negatives; without a queue."""


class MetricLearningConfig(Strict):
    """A loss and miner of pytorch-metric-learning that need only embeddings and their pairs, by name."""

    kind: Literal["pytorch_metric_learning"]
    loss: str
    """Class in pytorch_metric_learning.losses, such as NTXentLoss."""
    loss_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss, such as {temperature: 0.05}."""
    miner: str | None = None
    """Class in pytorch_metric_learning.miners; null: none."""
    miner_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the miner."""

    @field_validator("loss", "miner")
    @classmethod
    def _known_class(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None:
            return None
        # imports torch, which takes seconds
        module = import_module(f"pytorch_metric_learning.{'losses' if info.field_name == 'loss' else 'miners'}")
        choices = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        if name.startswith("_") or name not in choices:
            raise ValueError(f"{module.__name__} has no {name!r}; use one of {', '.join(sorted(choices))}")
        return name


def _ntxent_by_default(value: Any) -> Any:
    """Adds the kind NT-Xent to settings without one, such as `loss: {temperature: 0.1}`."""
    return {"kind": "ntxent", **value} if isinstance(value, dict) else value


ContrastiveLossConfig = Annotated[
    NTXentConfig | MetricLearningConfig, Field(discriminator="kind"), BeforeValidator(_ntxent_by_default)
]


class DeclutrConfig(ObjectiveConfig):
    """Contrastive loss + MLM (DeCLUTR eq. 3), or one of them."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.declutr.objective:Declutr"
    metrics: ClassVar[tuple[str, ...]] = ("contrastive", "mlm")
    scores: ClassVar[tuple[str, ...]] = ("distant_recall_at_1", "distant_mrr", "recall_at_1", "mrr")
    method: ClassVar[str] = "DeCLUTR"
    without_mlm: ClassVar[str] = "objective.terms=contrastive"

    kind: Literal["declutr"] = "declutr"
    terms: Literal["both", "contrastive", "mlm"] = "both"
    """Losses to sum."""
    loss: ContrastiveLossConfig = NTXentConfig()
    """The contrastive loss."""
    masking: MaskingConfig = MaskingConfig()
    """Masking of anchors for MLM."""
    contrast_unmasked_anchors: bool = False
    """Embed anchors without masks for the contrastive loss."""
    queue_size: int = Field(default=0, ge=0)
    """Earlier embeddings as extra negatives, for ntxent; 0: none."""
    reference_rank_scaling: Annotated[int, Field(ge=1)] | None = None
    """Divide the contrastive gradient by this number (paper: 4). null: off."""

    @model_validator(mode="after")
    def _queue_needs_ntxent(self) -> "DeclutrConfig":
        if self.queue_size and self.loss.kind != "ntxent":
            raise ValueError(f"queue_size = {self.queue_size} needs loss kind ntxent, not {self.loss.kind}")
        if self.queue_size and self.excludes_same_document:
            raise ValueError(
                f"queue_size = {self.queue_size} and loss.exclude_same_document = true exclude each other: a queue "
                "has no documents; set queue_size to 0"
            )
        return self

    @property
    def excludes_same_document(self) -> bool:
        """True if the loss needs the document of each row."""
        return isinstance(self.loss, NTXentConfig) and self.loss.exclude_same_document

    @property
    def mlm(self) -> bool:
        """True if the MLM loss is computed."""
        return self.terms != "contrastive"

    @property
    def unmasked_anchors(self) -> bool:
        """True if anchors are packed twice: masked for MLM and unmasked for the contrastive loss."""
        return self.contrast_unmasked_anchors and self.terms == "both"

    @property
    def embeds(self) -> bool:
        """True if the contrastive loss is computed."""
        return self.terms != "mlm"

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reports anchors without negatives, spans beyond the windows, and losses that reject their arguments."""
        problems = _geometry_problems(run, manifest)
        alone = run.batch_documents == 1 and (run.spans.num_anchors == 1 or self.excludes_same_document)
        if alone and self.embeds and self.loss.kind == "ntxent" and not self.queue_size:
            problems.append("batch_documents = 1: an anchor needs spans of other documents as negatives; at least 2")
        if isinstance(self.loss, MetricLearningConfig):
            from declutr.trainer.objectives.declutr.objective import metric_learning_problems

            problems += metric_learning_problems(self.loss)
        return problems

    def remark_before(self, run: RunContext) -> str | None:
        """A warning about a batch with fewer documents than the paper's, or None."""
        if not self.embeds or self.queue_size or run.batch_documents >= _FEW_DOCUMENTS:
            return None
        return (
            f"batch_documents = {run.batch_documents}: a span is compared with spans of {run.batch_documents - 1} "
            f"other documents ({_FEW_DOCUMENTS - 1} in the paper), an easy task that teaches little. Increase "
            "batch_documents; microbatch_tokens limits the memory"
        )

    def remark_after_first_step(self, run: RunContext, terms: dict[str, float]) -> str | None:
        """A warning about a contrastive loss far below that of guessing, or None.

        Guessing among the 2M - 1 other embeddings of M anchors and their positives costs log(2M - 1).
        """
        if not self.embeds or self.loss.kind != "ntxent" or self.reference_rank_scaling:
            return None
        guessing = math.log(max(2, 2 * run.batch_documents * run.spans.num_anchors - 1))
        # the losses of all sizes are added
        first = terms["contrastive"] / (self.matryoshka.total_weight if self.matryoshka else 1)
        if first >= _EASY_SHARE * guessing:
            return None
        harder = "" if run.spans.strategy == "distant" else ", or set spans.strategy=distant spans.num_anchors=1"
        return (
            f"the first contrastive loss is {first:.3f}, and guessing gives {guessing:.2f}: this "
            "encoder already distinguishes the spans of a batch. Increase batch_documents (now "
            f"{run.batch_documents}){harder}"
        )


def _geometry_problems(run: RunContext, manifest: Manifest) -> list[str]:
    spans, geometry, short_documents = run.spans, manifest.geometry, manifest.short_documents
    prepared = "the shards were prepared for at most"
    again = "lower it, or prepare the corpus again with a larger geometry"
    checks = [
        (
            spans.min_tokens > spans.max_tokens,
            f"spans.min_tokens = {spans.min_tokens}: it must be at most spans.max_tokens = {spans.max_tokens} (if not "
            "set, geometry.max_tokens of the shards); lower it",
        ),
        (
            spans.max_tokens > geometry.max_tokens,
            f"spans.max_tokens = {spans.max_tokens}: {prepared} {geometry.max_tokens}; {again}.max_tokens",
        ),
        (
            bool(spans.query_share) and spans.query_tokens[1] > spans.min_tokens,
            f"spans.query_tokens = {list(spans.query_tokens)}: they must be at most spans.min_tokens = "
            f"{spans.min_tokens}; lower them",
        ),
        (  # fewer_anchors: the windows of a document decide
            spans.num_anchors > geometry.num_anchors and short_documents != "fewer_anchors",
            f"spans.num_anchors = {spans.num_anchors}: {prepared} {geometry.num_anchors}; {again}.num_anchors",
        ),
        (  # only there windows are shorter than l_max
            spans.min_tokens > geometry.min_tokens and short_documents == "shrink_spans",
            f"spans.min_tokens = {spans.min_tokens}: short documents in the shards have windows of only "
            f"{geometry.min_tokens} tokens; {again}.min_tokens",
        ),
    ]
    return [message for applies, message in checks if applies]
