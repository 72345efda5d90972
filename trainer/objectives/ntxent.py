"""Contrastive losses over the embeddings of a whole global batch.

Legend: M anchors of the batch, D embedding size, Q queued embeddings.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from common.config import Strict


class NTXentConfig(Strict):
    """NT-Xent (DeCLUTR eq. 1 divided by its 2M terms), computed in at least float32, exact at any temperature."""

    kind: Literal["ntxent"] = "ntxent"
    temperature: float = Field(default=0.05, gt=0)
    """Divides the cosine similarities."""


class MetricLearningConfig(Strict):
    """Any loss and miner of pytorch-metric-learning, by name. Its NTXentLoss needs O(M^3) memory."""

    kind: Literal["pytorch_metric_learning"]
    loss: str
    """Class name in pytorch_metric_learning.losses, for example NTXentLoss or SupConLoss."""
    loss_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss, for example {temperature: 0.05}."""
    miner: str | None = None
    """Class name in pytorch_metric_learning.miners."""
    miner_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the miner."""

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return _known("losses", name)

    @field_validator("miner")
    @classmethod
    def _known_miner(cls, name: str | None) -> str | None:
        return name if name is None else _known("miners", name)


def _known(module: str, name: str) -> str:
    import pytorch_metric_learning.losses
    import pytorch_metric_learning.miners

    choices = vars(getattr(pytorch_metric_learning, module))
    if name.startswith("_") or not isinstance(choices.get(name), type):
        names = sorted(key for key, value in choices.items() if isinstance(value, type))
        raise ValueError(f"pytorch_metric_learning.{module} has no {name!r}; it has {', '.join(names)}")
    return name


def ntxent(embeddings: Tensor, temperature: float, queue: Tensor | None = None) -> Tensor:
    """Mean over the 2M terms of -log(exp(s_ij/t) / sum_k exp(s_ik/t)), k over all but i and over the queue.

    Args:
        embeddings: `(2M, D)`, anchors first; row i and row i + M are each other's positive.
        temperature: t.
        queue: `(Q, D)` embeddings of earlier steps, negatives for every row; no gradient.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings if embeddings.dtype == torch.float64 else embeddings.float()
        rows = F.normalize(embeddings, dim=-1)
        num_rows = len(rows)
        scores = rows @ rows.T / temperature
        partner = torch.arange(num_rows, device=rows.device).roll(num_rows // 2)[:, None]
        positive = scores.gather(1, partner)[:, 0]
        # The lowest finite number, not -inf: with one pair there is no negative, and the gradient must be 0, not NaN.
        itself = torch.eye(num_rows, dtype=torch.bool, device=rows.device)
        left_out = itself.scatter(1, partner, True)
        scores = scores.masked_fill(left_out, torch.finfo(scores.dtype).min)
        if queue is not None and len(queue):
            scores = torch.cat([scores, rows @ F.normalize(queue.to(rows.dtype), dim=-1).T / temperature], dim=1)
        # log(1 + exp(logsumexp of the negatives - positive)): unlike softmax minus one-hot, it and its gradient keep
        # their digits in float32 when the positive wins by far and the loss is almost 0.
        return -F.logsigmoid(positive - scores.logsumexp(dim=1)).mean()


class MetricLearningLoss:
    """A pytorch-metric-learning loss and miner behind the same call as `ntxent`.

    Raises:
        ValueError: the loss has weights of its own (it classifies into known classes), or refuses its arguments.
    """

    def __init__(self, config: MetricLearningConfig) -> None:
        from pytorch_metric_learning import losses, miners

        try:
            self.loss = getattr(losses, config.loss)(**config.loss_arguments)
            self.miner = getattr(miners, config.miner)(**config.miner_arguments) if config.miner else None
        except TypeError as error:
            raise ValueError(f"objective.loss {config.loss} / miner {config.miner}: {error}") from error
        if any(True for _ in self.loss.parameters()):
            raise ValueError(f"objective.loss = {config.loss} learns class weights; documents have no classes")

    def __call__(self, embeddings: Tensor) -> Tensor:
        """The loss of `(2M, D)` embeddings, where row i and row i + M share a label."""
        labels = torch.arange(len(embeddings) // 2, device=embeddings.device).repeat(2)
        mined = self.miner(embeddings, labels) if self.miner is not None else None
        loss: Tensor = self.loss(embeddings, labels, mined)
        return loss
