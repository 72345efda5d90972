"""Settings and checks that objectives over short texts share, readable without torch."""

from typing import ClassVar

from pydantic import Field

from declutr.pipeline.shards.content import ContentKind
from declutr.trainer.objectives.config import ObjectiveConfig


class TextObjectiveConfig(ObjectiveConfig):
    """Base of the settings of objectives over sentences, pairs and triples."""

    reads: ClassVar[tuple[ContentKind, ...]] = ("sentences",)
    scores: ClassVar[tuple[str, ...]] = ("recall_at_1", "mrr")
    scored: ClassVar[str] = (
        "Held-out texts: uniformity (log form), effective rank; of premises also alignment and retrieval of an "
        "entailed hypothesis."
    )

    max_tokens: int = Field(default=32, ge=3)
    """Longest text, in tokens with specials; longer ones are cut at the end."""

    @property
    def text_tokens(self) -> int:
        """Largest number of tokens of a text, specials included."""
        return self.max_tokens

    def scores_of(self, content: ContentKind) -> tuple[str, ...]:
        """Retrieval needs hypotheses; sentences have only uniformity and effective rank, which choose no checkpoint."""
        return self.scores if content in ("pairs", "triples") else ()
