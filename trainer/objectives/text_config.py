"""Settings of the objectives over short texts: SimCSE, SCD, SCL; and their checks. Readable without torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from declutr.pipeline.shards.content import ContentKind, PairsContent
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.data.packing import MaskingConfig
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext

_NEEDS = ("entailment", "contradiction")


class TextObjectiveConfig(ObjectiveConfig):
    """Base of the settings of objectives over sentences, pairs and triples."""

    reads: ClassVar[tuple[ContentKind, ...]] = ("sentences",)
    scores: ClassVar[tuple[str, ...]] = ("recall_at_1", "mrr")
    scored: ClassVar[str] = (
        "Held-out texts: uniformity (log form), effective rank; of premises also alignment and retrieval of an "
        "entailed hypothesis."
    )

    max_tokens: int = Field(default=32, ge=3)
    """Longest text, in tokens with specials; longer ones are cut."""

    @property
    def text_tokens(self) -> int:
        """Largest number of tokens of a text, specials included."""
        return self.max_tokens

    def scores_of(self, content: ContentKind) -> tuple[str, ...]:
        """Retrieval needs hypotheses; sentences have only uniformity and effective rank, which choose no checkpoint."""
        return self.scores if content in ("pairs", "triples") else ()


class SimcseConfig(TextObjectiveConfig):
    """SimCSE (Gao et al. 2021); defaults of the unsupervised BERT run."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.simcse:Simcse"
    metrics: ClassVar[tuple[str, ...]] = ("contrastive", "mlm")
    reads: ClassVar[tuple[ContentKind, ...]] = ("sentences", "triples", "pairs")
    method: ClassVar[str] = "SimCSE"
    without_mlm: ClassVar[str] = "objective.mlm_loss_weight=0"

    kind: Literal["simcse"] = "simcse"
    supervised: bool = False
    """false: two forwards of a sentence. true: triples, or pairs with `required_labels: [entailment,
    contradiction]`."""
    hard_negatives: bool = True
    """false, supervised only: pairs need no contradicting hypothesis."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the cosine similarities."""
    hard_negative_weight: float = 0.0
    """Added to the logit of a row's contradiction; supervised only."""
    head: bool = True
    """Linear layer with tanh behind the pooling; exported only if `supervised`."""
    equal_views: bool = False
    """The same dropout in both views; unsupervised only."""
    mlm_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of an MLM loss on masked copies (paper: 0.1); 0: none."""
    mlm_copies: Literal["first", "all"] = "first"
    """Texts to mask and predict. first: the sentence or premise. all: every view."""
    masking: MaskingConfig = MaskingConfig()
    """Masking of the copies."""

    @model_validator(mode="after")
    def _fits_mode(self) -> "SimcseConfig":
        if self.hard_negative_weight and not self.supervised:
            raise ValueError(
                f"hard_negative_weight = {self.hard_negative_weight} needs supervised = true: without hypotheses "
                "no row has a hard negative"
            )
        if not self.hard_negatives and not self.supervised:
            raise ValueError("hard_negatives = false needs supervised = true: without hypotheses there is none")
        if self.hard_negative_weight and not self.hard_negatives:
            raise ValueError(f"hard_negative_weight = {self.hard_negative_weight} needs hard_negatives = true")
        if self.equal_views and self.supervised:
            raise ValueError("equal_views = true needs supervised = false: hypotheses are other texts")
        return self

    @property
    def learns(self) -> str:
        """Supervision by hypotheses, or none."""
        hypotheses = "entailed and contradicting" if self.hard_negatives else "entailed"
        return f"with {hypotheses} hypotheses" if self.supervised else "without labels"

    @property
    def asks(self) -> bool:
        """True with hypotheses: a premise searches them."""
        return self.supervised

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

    @property
    def against_collapse(self) -> str:
        """A smaller temperature, which pushes other texts apart harder."""
        return f"Lower objective.temperature (now {self.temperature})"

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reports a batch without a negative, and shards that do not fit the mode."""
        if run.batch_documents == 1 and not (self.supervised and self.hard_negatives):
            return ["batch_documents = 1: a text has no other to be told from, so the loss is always 0; at least 2"]
        kind = manifest.content.kind
        if kind in self.reads and self.supervised == (kind == "sentences"):
            value, other = ("true", "false") if self.supervised else ("false", "true")
            kinds = "triples or pairs" if self.supervised else "sentences"
            return [
                f"objective.supervised = {value}: the shards hold {kind}; set it to {other}, or prepare {kinds} "
                f"(content.kind={kinds})"
            ]
        needs = _NEEDS if self.hard_negatives else _NEEDS[:1]
        content = manifest.content
        of_label = isinstance(content, PairsContent) and (self.hard_negatives or content.label is not None)
        if of_label and not set(needs) <= {*getattr(content, "required_labels", ())}:
            return [
                f"objective.supervised = true: some premises of the shards may lack an {' or a '.join(needs)}; "
                f"prepare again with content.required_labels=[{', '.join(needs)}]"
            ]
        return []


Rate = Annotated[float, Field(ge=0, lt=1)]


class ScdConfig(TextObjectiveConfig):
    """SCD (Klein and Nabi 2022), as released; defaults of its BERT run.

    loss = alpha mean_i cos(z1_i, z2_i) / t + beta (sum_j (C_jj - 1)^2 + lambda sum_{j != k} C_jk^2), C the correlation
    of the projected views over the global batch.
    """

    implementation: ClassVar[str] = "declutr.trainer.objectives.texts:Scd"
    metrics: ClassVar[tuple[str, ...]] = ("repulsion", "decorrelation")
    method: ClassVar[str] = "SCD"
    sets_rates: ClassVar[bool] = True

    kind: Literal["scd"] = "scd"
    dropout_rates: tuple[Rate, Rate] = (0.05, 0.155)
    """Dropout of the two views' hidden states."""
    attention_dropout_rates: tuple[Rate, Rate] | None = None
    """Dropout of the two views' attention weights; null: `dropout_rates`."""
    repulsion_weight: float = Field(default=1.0, ge=0)
    """alpha: weight of the mean cosine of the two views."""
    decorrelation_weight: float = Field(default=0.005225, ge=0)
    """beta: weight of the decorrelation."""
    off_diagonal_weight: float = Field(default=0.012, ge=0)
    """lambda: weight of correlations between different dimensions."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the mean cosine."""
    projector: list[Annotated[int, Field(ge=1)]] = Field(default=[4096, 4096, 4096], min_length=1)
    """Widths of the projector's linear layers; not exported."""
    initializer_range: float | None = Field(default=None, gt=0)
    """Standard deviation of the projector's new weights (released: 0.02); null: torch's."""

    @model_validator(mode="after")
    def _views_differ(self) -> "ScdConfig":
        if not any((*self.dropout_rates, *(self.attention_dropout_rates or ()))):
            raise ValueError(
                f"dropout_rates = {list(self.dropout_rates)}: nothing is dropped, so both views would be "
                "equal; raise one"
            )
        return self

    @property
    def dropped(self) -> tuple[str, ...]:
        """The projector."""
        return (f"a projector of {'-'.join(map(str, self.projector))} with BatchNorm",)

    @property
    def against_collapse(self) -> str:
        """More decorrelation for the repulsion, which is smallest when the encoder tells the two rates apart alone."""
        return (
            f"Lower objective.repulsion_weight (now {self.repulsion_weight}), raise objective.decorrelation_weight "
            f"(now {self.decorrelation_weight}), or make objective.dropout_rates {list(self.dropout_rates)} more alike"
        )

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reports batches without correlation, and a loss that is always 0."""
        del manifest
        problems = []
        if not (self.repulsion_weight or self.decorrelation_weight):
            problems.append("objective.repulsion_weight and decorrelation_weight are 0, so the loss is 0; raise one")
        if run.batch_documents < 2:
            problems.append(
                f"batch_documents = {run.batch_documents}: BatchNorm and the correlation of scd need at least 2 "
                "sentences"
            )
        return problems


Limit = Annotated[int, Field(ge=1)] | Literal["all"]


class SclConfig(TextObjectiveConfig):
    """SCL on natural language inference: loss = (1 - lambda) cross entropy + lambda supervised contrast."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.texts:Scl"
    metrics: ClassVar[tuple[str, ...]] = ("classification", "contrastive")
    reads: ClassVar[tuple[ContentKind, ...]] = ("pairs",)
    method: ClassVar[str] = "SCL"

    kind: Literal["scl"] = "scl"
    contrastive_weight: float = Field(default=0.3, ge=0, le=1)
    """lambda: weight of the contrastive loss; 0: cross entropy alone."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the dot products."""
    positives: Limit = "all"
    """Largest number of positives of an anchor, its own included."""
    negatives: Limit = "all"
    """Largest number of negatives of an anchor (released: all)."""

    @property
    def learns(self) -> str:
        """Supervision by labels."""
        return "with labels of natural language inference"

    @property
    def dropped(self) -> tuple[str, ...]:
        """The classifier."""
        return ("a classifier of premise and hypothesis",)
