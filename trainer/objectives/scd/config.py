"""Settings of SCD and its checks before a run, readable without torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.objectives.config import RunContext, TextObjectiveConfig

Rate = Annotated[float, Field(ge=0, lt=1)]


class ScdConfig(TextObjectiveConfig):
    """SCD (Klein and Nabi 2022), as released; defaults of its BERT run.

    loss = alpha mean_i cos(z1_i, z2_i) / t + beta (sum_j (C_jj - 1)^2 + lambda sum_{j != k} C_jk^2), C the correlation
    of the projected views over the global batch.
    """

    implementation: ClassVar[str] = "declutr.trainer.objectives.scd.objective:Scd"
    metrics: ClassVar[tuple[str, ...]] = ("repulsion", "decorrelation")
    method: ClassVar[str] = "SCD"

    kind: Literal["scd"] = "scd"
    dropout_rates: tuple[Rate, Rate] = (0.05, 0.155)
    """Dropout rates of the two views' hidden states, instead of the encoder's."""
    attention_dropout_rates: tuple[Rate, Rate] | None = None
    """Dropout rates of the two views' attention weights; null: `dropout_rates`, as released."""
    repulsion_weight: float = Field(default=1.0, ge=0)
    """alpha (task_alpha as released): weight of the mean cosine of the two views, to be minimised."""
    decorrelation_weight: float = Field(default=0.005225, ge=0)
    """beta (task_beta as released): weight of the decorrelation."""
    off_diagonal_weight: float = Field(default=0.012, ge=0)
    """lambda: weight of correlations between different dimensions, relative to those of one with itself."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the mean cosine."""
    projector: list[Annotated[int, Field(ge=1)]] = Field(default=[4096, 4096, 4096], min_length=1)
    """Widths of the projector's linear layers; not exported."""
    initializer_range: float | None = Field(default=None, gt=0)
    """Standard deviation of the projector's initial weights, with biases of 0 (0.02 as released); null: torch's,
    uniform up to 1 / sqrt(inputs)."""

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

    @property
    def sets_rates(self) -> bool:
        """True: the two views have different rates."""
        return True

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
