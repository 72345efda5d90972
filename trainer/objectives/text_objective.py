"""Base of the objectives over short texts: how long a text may be, and how held-out texts are scored."""

from typing import TypeVar

import torch

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.objectives.base import Objective
from declutr.trainer.objectives.held_out import held_out_rows
from declutr.trainer.objectives.text_config import TextObjectiveConfig
from declutr.trainer.objectives.text_packing import TextPacker
from declutr.trainer.objectives.text_validation import TextValidator
from declutr.trainer.parallel.communicator import Communicator

TextConfig = TypeVar("TextConfig", bound=TextObjectiveConfig)


class TextObjective(Objective[TextConfig]):
    """A loss over sentences, pairs or triples."""

    def packer(self, vocabulary: Vocabulary, max_content: int) -> TextPacker:
        """Builds the packer of texts of at most `max_tokens` tokens, specials included."""
        return TextPacker(vocabulary, min(max_content, self.config.max_tokens - vocabulary.num_specials), self.run.seed)

    def validator(
        self,
        held_out: ShardSet,
        vocabulary: Vocabulary,
        max_content: int,
        max_documents: int,
        comm: Communicator,
        device: torch.device,
    ) -> TextValidator:
        """Builds the validator of held-out texts: retrieval for pairs and triples, and the spread of embeddings."""
        rows = held_out_rows(held_out, max_documents, self.run.seed)
        packer = self.packer(vocabulary, max_content)
        return TextValidator(packer, held_out, rows, self.exported(), comm, device, self.sizes)
