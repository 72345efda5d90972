"""Metrics of a step."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks.

    Attributes:
        loss: sum of the terms; `mlm` counts with the objective's `mlm_weight`, a task with its weight.
        terms: terms of the loss by name; `mlm` is the mean cross entropy over the global batch's selected tokens. A
            term that is not trained is 0. Terms of an auxiliary task have its name in front.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the update.
        num_selected: selected tokens.
        num_tokens: tokens that the encoder processed, specials included.
        padding_share: share of the encoder's token places that held padding.
        flops: multiplications and additions of forward and backward (trainer/model/flops.py).
        batch_digest: digest of the main task's global batch: documents, spans and masks; the same for any number of
            workers.
        skipped: true if the loss or the gradient was not finite, so that nothing was updated.
        auxiliary: spread of the batch of each task, and further numbers of auxiliary tasks, such as
            `image_batch_digest`.
    """

    loss: float
    terms: dict[str, float]
    grad_norm: float
    lr: float
    num_selected: int
    num_tokens: int
    padding_share: float
    flops: float
    batch_digest: int
    skipped: bool = False
    auxiliary: dict[str, float] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The metrics by name, with an entry for each term, as in `metrics.jsonl`."""
        numbers = asdict(self)
        auxiliary = numbers.pop("auxiliary")
        return {"loss": numbers.pop("loss"), **numbers.pop("terms"), **numbers, **auxiliary}
