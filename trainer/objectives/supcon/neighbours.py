"""Accuracy of nearest neighbours among held-out images or sounds, before and after training.

Legend: N held-out rows, H embedding size.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.config import NN_ACCURACY
from declutr.trainer.objectives.held_out import HELD_OUT_EPOCH, compute_together, held_out_rows
from declutr.trainer.objectives.supcon.collator import ClipCollator, label_keys
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.supcon.crops import NUM_VIEWS
from declutr.trainer.parallel.communicator import Communicator

_CHUNK = 32  # rows in one forward


def nearest_accuracy(queries: Tensor, candidates: Tensor, labels: NDArray[np.int64] | None) -> float | None:
    """Share of rows whose nearest neighbour, by cosine, is right; ties count against the encoder.

    With labels, the neighbour of a row is another row, and right if it has the same label; rows with a label of their
    own are left out. Without, it is right if it is the other view of the same row.

    Args:
        queries: `(N, H)` first views.
        candidates: `(N, H)` second views.
        labels: `(N,)`; None: without.

    Returns:
        The share; None if no row has a right and a wrong neighbour.
    """
    scores = F.normalize(queries, dim=-1) @ F.normalize(candidates, dim=-1).T
    groups = torch.arange(len(scores)) if labels is None else torch.from_numpy(labels)
    same = groups[:, None] == groups
    others = ~same
    if labels is not None:
        same.fill_diagonal_(False)
    judged = same.any(dim=1) & others.any(dim=1)
    right = scores.where(same, -torch.inf).amax(dim=1) > scores.where(others, -torch.inf).amax(dim=1)
    return float(right[judged].double().mean()) if bool(judged.any()) else None


@dataclass(frozen=True)
class NeighbourValidator:
    """Scores the encoder behind a task's frontend on held-out rows, shared among the workers; without head and dropout.

    Attributes:
        collator: cuts rows into patches.
        frontend: hidden states of patches.
        shards: held-out rows.
        rows: `(N,)` their numbers.
        labelled: true: whole images and sounds are compared by their labels. false: two views as in training.
        comm: the workers.
        device: device of the encoder.
    """

    collator: ClipCollator
    frontend: Frontend
    shards: ShardSet
    rows: NDArray[np.int64]
    labelled: bool
    comm: Communicator
    device: torch.device

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The accuracy; empty if it says nothing about these rows, None if embeddings are not finite."""
        table = self.shards.take(self.rows)
        epochs = np.full(len(table), HELD_OUT_EPOCH, np.int64)

        def embed(some: slice) -> Tensor:
            batch = self.collator.collate(self.views(table.slice(some.start, some.stop - some.start)), epochs[some])
            return encoder.embed(batch.spans.to(self.device), self.frontend).flatten().reshape(-1, NUM_VIEWS * width)

        width = encoder.output_size
        found = compute_together(encoder, len(table), NUM_VIEWS * width, embed, self.comm, self.device, _CHUNK)
        if not bool(found.isfinite().all()):
            return None
        first, second = found.split(width, dim=1)
        accuracy = nearest_accuracy(first, second, label_keys(table) if self.labelled else None)
        return {} if accuracy is None else {NN_ACCURACY: accuracy}

    def views(self, rows: pa.Table) -> pa.Table:
        """Rows whose labels are compared, with whole images as views; others as they are."""
        return self.collator.fetch.crops.whole(rows) if self.labelled and "image" in rows.column_names else rows


def neighbour_validator(
    config: SupconConfig,
    seed: int,
    frontend: Frontend,
    held_out: ShardSet,
    max_documents: int,
    comm: Communicator,
    device: torch.device,
) -> NeighbourValidator | None:
    """The validator of a task; None without labels if both views of a sound are equal, as they are without dropout."""
    content = held_out.manifest.content
    labelled = getattr(content, "label", None) is not None
    masked = not config.masks.shared and (config.masks.freq_mask or config.masks.time_mask)
    if content.kind == "audio" and not (labelled or masked):
        return None
    plain = config.model_copy(update={"mixup": 0.0, **({"masks": MaskConfig()} if labelled else {})})
    rows = held_out_rows(held_out, max_documents, seed)
    collator = ClipCollator(plain, frontend.config, seed)
    return NeighbourValidator(collator, frontend, held_out, rows, labelled, comm, device)
