"""Settings of the held-out scores, readable without torch."""

from pydantic import Field

from common.config import Strict

FOLLOWED = "followed"
"""The score that another process gives (`declutr evaluate --follow`)."""


class ValidationConfig(Strict):
    """When and on what the encoder is scored during training."""

    every_steps: int = Field(default=1000, ge=0)
    """Also before the first and after the last step; 0: never."""
    max_documents: int = Field(default=400, ge=2)
    """Held-out documents that are scored, at most."""
    score: str = ""
    """The score that decides which checkpoint is the best; empty: the objective's first, here distant_recall_at_1.
    distant_recall_at_1, distant_mrr: a span finds the one of its document that is `spans.max_tokens` or more away.
    recall_at_1, mrr: it finds the one that touches it. followed: the score of `declutr evaluate --follow RUN`, which
    scores checkpoints while the run trains, for runs in folders. A run that started when `recall_at_1` was the default
    keeps that score."""
    patience: int | None = Field(default=None, gt=0)
    """End the run when so many scores in a row are no better than the best, and export that one; null: never. With
    `followed` only checkpoints that were scored count. It may be changed while a run is under way."""
