"""Settings of the held-out scores, readable without torch."""

from typing import Literal

from pydantic import Field

from common.config import Strict


class ValidationConfig(Strict):
    """When and on what the encoder is scored during training."""

    every_steps: int = Field(default=1000, ge=0)
    """Also before the first and after the last step; 0: never."""
    max_documents: int = Field(default=400, ge=2)
    """Held-out documents that are scored, at most."""
    score: Literal["distant_recall_at_1", "distant_mrr", "recall_at_1", "mrr", "followed"] = "distant_recall_at_1"
    """What "best" means. distant_...: a span finds the one of its own document that is `spans.max_tokens` or more away;
    without: the one that touches it. followed: the score that `declutr evaluate --follow RUN` gives, alongside the
    training, for runs in folders. A run that began when `recall_at_1` was the default keeps that score."""
    patience: int | None = Field(default=None, gt=0)
    """End the run when so many scores in a row are no better than the best, and export that one; null: never. With
    `followed` only checkpoints that were scored count. It may be changed while a run is under way."""
