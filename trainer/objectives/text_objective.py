"""Base of the objectives over short texts: how long a text may be, and how held-out texts are scored.

Held-out scores of short texts: retrieval of entailed hypotheses, alignment, uniformity, effective rank.

Legend: N held-out rows, S texts, H embedding size.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from declutr.pipeline.shards.content import ENTAILMENT
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import Objective
from declutr.trainer.objectives.config import TextObjectiveConfig
from declutr.trainer.objectives.held_out import embed_together, held_out_rows
from declutr.trainer.objectives.measures import alignment, by_size, effective_rank, retrieval, uniformity
from declutr.trainer.objectives.text_packing import TextPacker, Texts
from declutr.trainer.parallel.communicator import Communicator


@dataclass(frozen=True)
class TextValidator:
    """Scores an encoder on held-out texts, shared among the workers.

    Sentences have no pairs, so only uniformity and effective rank are computed. Of other rows, the premise must find
    its first entailed hypothesis; rows without one are left out of the retrieval.

    Attributes:
        packer: packs texts.
        shards: rows to score.
        rows: `(N,)` their numbers.
        layers: layers behind the pooling that are exported.
        comm: the workers.
        device: device of the encoder.
        sizes: smaller sizes of the embedding to score too.
    """

    packer: TextPacker
    shards: ShardSet
    rows: NDArray[np.int64]
    layers: list[Dense]
    comm: Communicator
    device: torch.device
    sizes: tuple[int, ...] = ()

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The scores by name; None if embeddings are not finite."""
        texts = Texts(self.shards.take(self.rows))
        entailed = np.flatnonzero(texts.labels == ENTAILMENT)
        having, places = np.unique(texts.rows[entailed], return_index=True)
        chosen = np.concatenate([texts.first, entailed[places]])
        epochs, numbers = np.zeros(len(texts.first), np.int64), np.zeros(len(chosen), np.int64)
        embeddings = embed_together(
            encoder,
            len(chosen),
            lambda part: self.packer.pack(texts, chosen[part], numbers[part], epochs),
            self.layers,
            self.comm,
            self.device,
        )
        if not bool(embeddings.isfinite().all()):
            return None

        def scores(size: int | None) -> dict[str, float]:
            first, positives = embeddings[:, :size].tensor_split([len(texts.first)])
            scores = {"uniformity": uniformity(first), "effective_rank": effective_rank(first)}
            if len(positives) < 2:
                return scores
            anchors = first[torch.from_numpy(having)]
            ranked = retrieval(anchors, positives, texts.keys[having])
            return {**ranked, "alignment": alignment(anchors, positives), **scores}

        return by_size(self.sizes, scores)


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
