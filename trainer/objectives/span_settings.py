"""The `spans` section of a run, readable without torch: how spans are drawn from a document."""

from typing import Literal

from pydantic import Field, model_validator

from common.config import Strict


class SpanConfig(Strict):
    """How spans are drawn from a document."""

    num_anchors: int = Field(default=2, ge=1, le=64)
    """Anchors A per document and epoch; without a value, the `geometry.num_anchors` of the shards."""
    num_positives: int = Field(default=2, ge=1, le=64)
    """Positives P per anchor."""
    min_tokens: int = Field(default=32, ge=1)
    """Shortest span, l_min, in tokens without specials; without a value, the `geometry.min_tokens` of the shards, or
    `max_tokens` if that is smaller."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest span, l_max, without specials; at most the `geometry.max_tokens` of the shards, which is also the value
    if none is given."""
    strategy: Literal["all", "adjacent", "subsuming"] = "all"
    """Position of positives: anywhere that overlaps or touches the anchor (all), next to it (adjacent), or inside it
    (subsuming)."""

    @model_validator(mode="after")
    def _ordered(self) -> "SpanConfig":
        given = {"min_tokens", "max_tokens"} <= self.model_fields_set  # the shards give the other one
        if given and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} must be at most max_tokens = {self.max_tokens}")
        return self

    @property
    def min_document_tokens(self) -> int:
        """Shortest document that surely holds A windows apart: 2 * A * l_max."""
        return 2 * self.num_anchors * self.max_tokens
