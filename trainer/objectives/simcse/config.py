"""Settings of SimCSE and its checks before a run, readable without torch."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.objectives.config import RunContext, TextObjectiveConfig
from declutr.trainer.objectives.masking import MaskingConfig

_NEEDS = ("entailment", "contradiction")


class SimcseConfig(TextObjectiveConfig):
    """SimCSE (Gao et al. 2021): cross entropy of cosines over the batch; defaults of the unsupervised BERT run."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.simcse.objective:Simcse"
    metrics: ClassVar[tuple[str, ...]] = ("contrastive", "mlm")
    reads: ClassVar[tuple[ContentKind, ...]] = ("sentences", "triples", "pairs")
    method: ClassVar[str] = "SimCSE"
    without_mlm: ClassVar[str] = "objective.mlm_loss_weight=0"

    kind: Literal["simcse"] = "simcse"
    supervised: bool = False
    """false: two forwards of a sentence with different dropout (content sentences). true: a premise, an entailed and
    a contradicting hypothesis (content triples, or pairs with `required_labels: [entailment, contradiction]`)."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the cosine similarities."""
    hard_negative_weight: float = 0.0
    """Number added to the logit of a row's own contradiction; supervised only."""
    head: bool = True
    """Train a linear layer with tanh behind the pooling; exported only if `supervised`."""
    equal_views: bool = False
    """Drop the same features in both forwards, so that a sentence's views are equal. Unsupervised only."""
    mlm_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of an MLM loss on masked copies of the texts (0.1 in the paper); 0: no copies."""
    mlm_copies: Literal["first", "all"] = "first"
    """Texts of a row to copy, mask and predict. first: the sentence or premise. all: every view with its own mask, as
    released, at as many more forwards."""
    masking: MaskingConfig = MaskingConfig()
    """Masking of the copies."""

    @model_validator(mode="after")
    def _fits_mode(self) -> "SimcseConfig":
        if self.hard_negative_weight and not self.supervised:
            raise ValueError(
                f"hard_negative_weight = {self.hard_negative_weight} needs supervised = true: without hypotheses "
                "no row has a hard negative"
            )
        if self.equal_views and self.supervised:
            raise ValueError("equal_views = true needs supervised = false: hypotheses are other texts")
        return self

    @property
    def learns(self) -> str:
        """Supervision by hypotheses, or none."""
        return "with entailed and contradicting hypotheses" if self.supervised else "without labels"

    @property
    def dropped(self) -> tuple[str, ...]:
        """The head, unless it is exported."""
        return ("a linear layer with tanh behind the pooling",) if self.head and not self.supervised else ()

    @property
    def mlm(self) -> bool:
        """True if a masked copy is predicted."""
        return self.mlm_loss_weight > 0

    @property
    def mlm_weight(self) -> float:
        """Weight of the MLM loss."""
        return self.mlm_loss_weight

    @property
    def needs_dropout(self) -> bool:
        """True if the two views differ by dropout alone."""
        return not (self.supervised or self.equal_views)

    def remark_before(self, run: RunContext) -> str | None:
        """A warning about a batch without other sentences, or None."""
        if run.batch_documents > 1 or self.supervised:
            return None
        return "batch_documents = 1: a sentence has no other to be told from, so the loss is always 0; increase it"

    @property
    def against_collapse(self) -> str:
        """A smaller temperature, which pushes other texts apart harder."""
        return f"Lower objective.temperature (now {self.temperature})"

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reports shards that do not fit the mode."""
        del run
        kind = manifest.content.kind
        if not self.supervised and kind in ("pairs", "triples"):
            return [
                f"objective.supervised = false: the shards hold {kind}; set it to true, or prepare sentences "
                "(content.kind=sentences)"
            ]
        if self.supervised and kind == "sentences":
            return [
                "objective.supervised = true: the shards hold sentences; set it to false, or prepare triples or pairs "
                "(content.kind)"
            ]
        if kind == "pairs" and not set(_NEEDS) <= set(getattr(manifest.content, "required_labels", ())):
            return [
                "objective.supervised = true: some premises of the shards may lack an entailment or a contradiction; "
                f"prepare again with content.required_labels=[{', '.join(_NEEDS)}]"
            ]
        return []
