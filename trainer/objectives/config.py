"""Settings that objectives share, and facts about them that the trainer needs before torch is loaded."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from declutr.common.config import Strict
from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.model.config import FrontendConfig

BetaShape = Annotated[int, Field(ge=1, le=32)]
"""A parameter of a Beta law: with whole numbers it is the law of an order statistic."""


class SpanConfig(Strict):
    """Spans drawn from a document."""

    num_anchors: int = Field(default=2, ge=1, le=64)
    """Anchors A per document and epoch; not set: `geometry.num_anchors`."""
    num_positives: int = Field(default=2, ge=1, le=64)
    """Positives P per anchor."""
    min_tokens: int = Field(default=32, ge=1)
    """Shortest span, l_min, in tokens without specials; not set: `geometry.min_tokens`."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest span, l_max; at most, and if not set, `geometry.max_tokens`."""
    anchor_beta: tuple[BetaShape, BetaShape] = (4, 2)
    """Whole numbers a and b: an anchor's length follows Beta(a, b) between both limits."""
    positive_beta: tuple[BetaShape, BetaShape] = (2, 4)
    """As `anchor_beta`, of a positive's length."""
    strategy: Literal["all", "adjacent", "subsuming", "distant"] = "all"
    """Position of positives. all: overlapping or touching the anchor. adjacent: next to it. subsuming: inside it.
    distant: without overlap."""
    min_distance_tokens: int = Field(default=0, ge=0)
    """Least tokens between anchor and positives, if they fit; with `strategy: distant`."""
    query_share: float = Field(default=0, ge=0, le=1)
    """Share of the anchors that are as short as queries; their positives are the text beside them."""
    query_tokens: tuple[Annotated[int, Field(ge=1)], int] = (4, 16)
    """Tokens of the shortest and longest such anchor, at most `min_tokens`."""

    @model_validator(mode="after")
    def _ordered(self) -> "SpanConfig":
        if self.min_distance_tokens and self.strategy != "distant":
            raise ValueError(
                f"min_distance_tokens = {self.min_distance_tokens} needs strategy = distant, not {self.strategy}"
            )
        if self.query_tokens[0] > self.query_tokens[1]:
            raise ValueError(f"query_tokens = {list(self.query_tokens)}: the first must be at most the second")
        default = type(self).model_fields["query_tokens"].default  # a plan that workers get sets every field
        if self.query_share == 0 and self.query_tokens != default:
            raise ValueError("query_tokens has no effect with query_share = 0; set query_share, or remove it")
        both_set = {"min_tokens", "max_tokens"} <= self.model_fields_set  # an unset one comes from the shards
        if both_set and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} must be at most max_tokens = {self.max_tokens}")
        return self

    @property
    def min_document_tokens(self) -> int:
        """Least number of tokens that guarantees room for A separate windows: 2 * A * l_max."""
        return 2 * self.num_anchors * self.max_tokens


Size = int | Literal["all"]


class MatryoshkaConfig(Strict):
    """Matryoshka (Kusupati et al. 2022): the first numbers of an embedding are trained as embeddings, too."""

    sizes: list[Size]
    """Sizes to train, such as [32, 64, 128, all]; all is required."""
    weights: list[float] | None = None
    """Weights of the losses of these sizes; null: 1 each."""

    @field_validator("sizes", mode="before")
    @classmethod
    def _whole_numbers(cls, sizes: Any) -> Any:
        """Refuses what is no size, before pydantic would convert it."""
        if not isinstance(sizes, list | tuple) or not sizes:
            raise ValueError("must be a list of sizes, such as [32, 64, 128, all]")
        # True is an int, too
        wrong = [size for size in sizes if size != "all" and not (type(size) is int and size >= 1)]
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))}: a size must be a whole number from 1, or all")
        if doubled := sorted({str(size) for size in sizes if sizes.count(size) > 1}):
            raise ValueError(f"{', '.join(doubled)} is listed twice; list each size once")
        return list(sizes)

    @field_validator("weights")
    @classmethod
    def _one_each(cls, weights: list[float] | None, info: ValidationInfo) -> list[float] | None:
        number = len(info.data.get("sizes", weights or []))  # refused sizes are absent, and reported alone
        if weights is not None and len(weights) != number:
            raise ValueError(f"{number} sizes need {number} weights, one each, not {len(weights)}")
        if weights is not None and (min(weights, default=0) < 0 or not any(weights)):
            raise ValueError("a weight must be a number from 0, and one of them above 0")
        return weights

    @property
    def total_weight(self) -> float:
        """Sum of the weights: the loss of guessing grows by this factor."""
        return sum(self.weights or [1.0] * len(self.sizes))

    def cuts(self, embedding_size: int) -> list[tuple[int, float]]:
        """Each size with its weight, the whole embedding as `embedding_size`."""
        sizes = [embedding_size if size == "all" else size for size in self.sizes]
        return list(zip(sizes, self.weights or [1.0] * len(sizes), strict=True))

    def problem(self, embedding_size: int) -> str | None:
        """The reason why an embedding of this size cannot be cut to these sizes, or None."""
        sizes = [size for size, _ in self.cuts(embedding_size)]
        setting = f"objective.matryoshka.sizes = [{', '.join(map(str, self.sizes))}]"
        if large := [size for size in sizes if size > embedding_size]:
            return f"{setting}: the embedding has {embedding_size} numbers; remove {', '.join(map(str, large))}"
        if sizes.count(embedding_size) > 1:
            return f"{setting}: all and {embedding_size} are the same size; remove one of them"
        if embedding_size not in sizes:
            return f"{setting}: nothing would train the last of {embedding_size} numbers; add all"
        return None


REPORTED = "reported_"  # before the name of a score: its value on the rows that choose nothing
NN_ACCURACY = "nn_accuracy"
"""Score of images and sounds, after the name of their task: share of held-out rows whose nearest neighbour is right."""


@dataclass(frozen=True)
class RunContext:
    """The part of a run that an objective may depend on."""

    seed: int = 0  # seed of the run
    spans: SpanConfig = field(default_factory=SpanConfig)  # the `spans` section, completed from the shards
    batch_documents: int = 16  # rows of the shards in one global batch
    short_documents: ShortDocuments = "drop"  # treatment of short documents when the shards were prepared
    frontend: FrontendConfig | None = None  # settings of the patches, of a task with images or sounds


class ObjectiveConfig(Strict):
    """Base of the settings of every objective; docs/guides/new-objective.md shows a complete one.

    A subclass defines `kind: Literal["name"] = "name"`, the class variables, and its own settings.
    """

    kind: str
    """Name of the objective."""
    matryoshka: MatryoshkaConfig | None = None
    """Sizes of the embedding trained together; null: the whole alone."""

    implementation: ClassVar[str]
    """`package.module:Class` of its `Objective`, imported when the run is built."""
    metrics: ClassVar[tuple[str, ...]]
    """Names of the loss terms in `metrics.jsonl`; the trainer computes `mlm`, masked language modelling."""
    reads: ClassVar[tuple[ContentKind, ...]] = ("documents",)
    """Kinds of content of the shards that it can read."""
    scores: ClassVar[tuple[str, ...]] = ()
    """Names of the held-out scores that its validator computes; `validation.score` is one of them, by default the
    first."""
    sets_rates: ClassVar[bool] = False
    """True if its spans have dropout rates, which replace those of the encoder."""
    method: ClassVar[str]
    """Name of the method, for the model card."""
    without_mlm: ClassVar[str] = "another objective"
    """The setting that turns MLM off, for messages about encoders without an MLM head."""
    scored: ClassVar[str] = (
        "Same-document span retrieval, alignment, uniformity (log form) and effective rank on held-out documents of "
        "the corpus."
    )
    """Description of its held-out scores, for the model card."""

    @model_validator(mode="after")
    def _sizes_have_a_loss(self) -> "ObjectiveConfig":
        if self.matryoshka is not None and not self.embeds:
            raise ValueError("matryoshka needs a loss of embeddings, and only MLM is trained; remove matryoshka")
        return self

    def scores_of(self, content: ContentKind) -> tuple[str, ...]:
        """The held-out scores for shards of this kind; empty if its validator cannot read them."""
        return self.scores if content in self.reads else ()

    @property
    def embeds(self) -> bool:
        """True if the loss uses embeddings. If not, the projection gets no gradient and microbatches need one pass."""
        return True

    @property
    def mlm(self) -> bool:
        """True if the encoder's MLM head predicts selected tokens."""
        return False

    @property
    def text_tokens(self) -> int | None:
        """`max_tokens` of an objective over texts, specials included; None if `spans.max_tokens` is the limit."""
        return None

    @property
    def asks(self) -> bool:
        """True if the first text of a row is a query for the others, so that it has `encoder.query_prompt`."""
        return False

    @property
    def learns(self) -> str:
        """Supervision by the data, for the model card."""
        return "without labels"

    @property
    def dropped(self) -> tuple[str, ...]:
        """Parts that are trained and not exported, for the model card."""
        return ()

    @property
    def needs_dropout(self) -> bool:
        """True if views of a row differ by dropout alone, so that an encoder without dropout teaches nothing."""
        return False

    @property
    def against_collapse(self) -> str:
        """The objective's own remedy when all embeddings become alike, a sentence without its end; empty: none."""
        return ""

    @property
    def forms_classes(self) -> bool:
        """True if embeddings of a class are to become one, so that few dimensions are no collapse."""
        return False

    @property
    def mlm_weight(self) -> float:
        """Weight of the MLM loss, the mean cross entropy of the selected tokens."""
        return 1.0

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reasons why these settings cannot train on these shards, one line each; checked before Ray starts."""
        del run, manifest
        return []

    def remark_before(self, run: RunContext) -> str | None:
        """A warning about a run that can start but will teach little, or None."""
        del run
        return None

    def remark_after_first_step(self, run: RunContext, terms: dict[str, float]) -> str | None:
        """A warning about the loss terms of the first step, or None."""
        del run, terms
        return None
