"""SupCon and SimCLR over two views of images or sounds.

Legend: M rows of the global batch, D embedding size.
"""

import torch
from torch import Tensor, nn

from declutr.common.errors import UsageError
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import Collator
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.base import Gathered, Objective, Validator
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.simcse.infonce import infonce
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.loss import by_rank_of_class, supcon
from declutr.trainer.objectives.supcon.neighbours import neighbour_validator
from declutr.trainer.parallel.communicator import Communicator


class Supcon(Objective[SupconConfig]):
    """The contrastive loss over `(M, 2, D)` views, with the labels of the data or without."""

    def __init__(self, config: SupconConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.head: nn.Module = nn.Identity()
        if config.head:
            self.head = nn.Sequential(nn.Linear(embedding_size, embedding_size), nn.Tanh())
        self.shards_rows = not (config.reference_supcon and config.labels)  # that form needs the whole matrix of scores

    def collator(self, vocabulary: Vocabulary, max_content: int) -> Collator:
        """Builds the collator that cuts two views of each clip into patches."""
        del vocabulary, max_content
        if self.run.frontend is None:
            raise UsageError("objective supcon reads patches: a task with images or sounds has a frontend")
        return ClipCollator(self.config, self.run.frontend, self.run.seed)

    def clip_validator(
        self, held_out: ShardSet, frontend: Frontend, max_documents: int, comm: Communicator, device: torch.device
    ) -> Validator | None:
        """Builds the validator that computes the accuracy of nearest neighbours."""
        return neighbour_validator(self.config, self.run.seed, frontend, held_out, max_documents, comm, device)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """L_out of Khosla et al. times t / base_temperature; or the released form."""
        config, labels = self.config, batch.facts["label"]
        first, second = self.head(batch.views).unbind(1)
        if config.reference_supcon:
            loss = (
                by_rank_of_class(first, second, labels, config.temperature)
                if config.labels
                else infonce(first, second, config.temperature, row_shard=batch.row_shard)
            )
        else:
            groups = labels if config.labels else torch.arange(len(labels), device=labels.device)
            loss = supcon(torch.cat([first, second]), groups.repeat(2), config.temperature, row_shard=batch.row_shard)
            loss = loss * (config.temperature / config.base_temperature)
        return {"supcon": loss}
