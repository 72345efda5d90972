"""The `spans` section of a run: settings for drawing spans. Readable without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict

BetaShape = Annotated[int, Field(ge=1, le=32)]
"""A parameter of a Beta law: with whole numbers it is the law of an order statistic."""


class SpanConfig(Strict):
    """Numbers, lengths and positions of the spans drawn from a document."""

    num_anchors: int = Field(default=2, ge=1, le=64)
    """Anchors A per document and epoch; if not set, `geometry.num_anchors` of the shards."""
    num_positives: int = Field(default=2, ge=1, le=64)
    """Positives P per anchor."""
    min_tokens: int = Field(default=32, ge=1)
    """Shortest span, l_min, in tokens without specials; if not set, `geometry.min_tokens` of the shards, or
    `max_tokens` if that is smaller."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest span, l_max, in tokens without specials; at most, and if not set, `geometry.max_tokens` of the shards."""
    anchor_beta: tuple[BetaShape, BetaShape] = (4, 2)
    """Whole numbers a and b: an anchor's length follows Beta(a, b) between `min_tokens` and `max_tokens`, with mean a /
    (a + b)."""
    positive_beta: tuple[BetaShape, BetaShape] = (2, 4)
    """As `anchor_beta`, of a positive's length."""
    strategy: Literal["all", "adjacent", "subsuming", "distant"] = "all"
    """Position of positives. all: overlapping or touching the anchor. adjacent: next to it. subsuming: inside it.
    distant: anywhere in the document without overlap."""
    min_distance_tokens: int = Field(default=0, ge=0)
    """Least number of tokens between an anchor and its positives, with `strategy: distant`; in too short documents they
    are as far away as possible."""

    @model_validator(mode="after")
    def _ordered(self) -> "SpanConfig":
        if self.min_distance_tokens and self.strategy != "distant":
            raise ValueError(
                f"min_distance_tokens = {self.min_distance_tokens} needs strategy = distant, not {self.strategy}"
            )
        both_set = {"min_tokens", "max_tokens"} <= self.model_fields_set  # an unset one comes from the shards
        if both_set and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} must be at most max_tokens = {self.max_tokens}")
        return self

    @property
    def min_document_tokens(self) -> int:
        """Least number of tokens that guarantees room for A separate windows: 2 * A * l_max."""
        return 2 * self.num_anchors * self.max_tokens
