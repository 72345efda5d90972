"""DeCLUTR: contrast spans of the same document against all others, and predict masked tokens of the anchors.

Legend: n documents on this rank, m their anchors (n * A, or fewer where documents are short), A anchors a document, P
positives an anchor, M = anchors of the global batch, D size.
"""

import torch
from torch import Tensor

from trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig, NTXentConfig
from trainer.objectives.declutr.ntxent import MetricLearningLoss, ntxent
from trainer.parallel.world import World


class Declutr:
    """The contrastive half of the objective: from this rank's span embeddings to the loss of the global batch.

    Args:
        config: terms and losses.
        num_anchors: A.
        num_positives: P.
    """

    def __init__(self, config: DeclutrConfig, num_anchors: int, num_positives: int) -> None:
        self.config = config
        self.num_anchors = num_anchors
        self.num_positives = num_positives
        self.queue: Tensor | None = None
        self._metric_loss = MetricLearningLoss(config.loss) if isinstance(config.loss, MetricLearningConfig) else None

    def anchors_in(self, num_spans: int) -> int:
        """m: anchors among this many spans of a batch that is contrasted."""
        return num_spans // (1 + self.config.unmasked_anchors + self.num_positives)

    def represent(self, spans: Tensor, num_documents: int) -> Tensor:
        """Views that meet other workers, `(m, 2, D)`: each anchor and its positives' mean (paper section 3.1).

        Args:
            spans: `(S, D)` embeddings in the feed's order.
            num_documents: n.

        Raises:
            ValueError: not the spans of n documents.
        """
        rows = self.anchors_in(len(spans))
        if not num_documents <= rows <= num_documents * self.num_anchors:
            raise ValueError(
                f"{len(spans)} spans are {rows} anchors, {num_documents} documents have 1 to {self.num_anchors} each"
            )
        masked, rest = spans[:rows], spans[rows:]
        anchors, rest = (rest[:rows], rest[rows:]) if self.config.unmasked_anchors else (masked, rest)
        positives = rest.reshape(rows, self.num_positives, spans.shape[-1]).mean(dim=1)
        return torch.stack([anchors, positives], dim=1)

    def loss(self, views: Tensor, start: int, total: int, world: World) -> tuple[Tensor, Tensor]:
        """The contrastive loss of the global batch, and the embeddings it saw.

        Args:
            views: this rank's `(m, 2, D)`.
            start: place of this rank's first anchor among all M.
            total: M.
            world: the workers.

        Returns:
            A scalar whose gradient with respect to `views` is complete, and `(2M, D)` detached embeddings.
        """
        gathered = world.gather(views.flatten(1), start, total).view(total, 2, -1)
        embeddings = torch.cat([gathered[:, 0], gathered[:, 1]])
        if self._metric_loss is not None:
            value = self._metric_loss(embeddings)
        else:
            assert isinstance(self.config.loss, NTXentConfig)
            value = ntxent(embeddings, self.config.loss.temperature, self.queue)
        if self.config.released_rank_scaling:
            value = value / world.size + (value - value / world.size).detach()
        return value, embeddings.detach()

    def remember(self, embeddings: Tensor) -> None:
        """Puts a finished step's `(2M, D)` embeddings into the queue; the oldest leave it."""
        if self.config.queue_size:
            kept = embeddings if self.queue is None else torch.cat([self.queue, embeddings])
            self.queue = kept[-self.config.queue_size :].clone()

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the queue, once it exists."""
        return {} if self.queue is None else {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores `state_dict`."""
        self.queue = state.get("queue")
