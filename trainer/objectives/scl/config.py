"""Settings of SCL and its checks before a run, readable without torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from declutr.pipeline.shards.content import ContentKind
from declutr.trainer.objectives.config import TextObjectiveConfig

Most = Annotated[int, Field(ge=1)] | Literal["all"]


class SclConfig(TextObjectiveConfig):
    """SCL on natural language inference: loss = (1 - lambda) cross entropy + lambda supervised contrast."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.scl.objective:Scl"
    metrics: ClassVar[tuple[str, ...]] = ("classification", "contrastive")
    reads: ClassVar[tuple[ContentKind, ...]] = ("pairs",)
    method: ClassVar[str] = "SCL"

    kind: Literal["scl"] = "scl"
    contrastive_weight: float = Field(default=0.3, ge=0, le=1)
    """lambda: weight of the contrastive loss; 0: cross entropy alone."""
    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the dot products."""
    positives: Most = "all"
    """Largest number of positives of an anchor, its own hypothesis included; others are drawn."""
    negatives: Most = "all"
    """Largest number of negatives of an anchor; the released code always takes all."""

    @property
    def learns(self) -> str:
        """Supervision by labels."""
        return "with labels of natural language inference"

    @property
    def dropped(self) -> tuple[str, ...]:
        """The classifier."""
        return ("a classifier of premise and hypothesis",)
