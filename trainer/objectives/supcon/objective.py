"""SupCon and SimCLR over two views of images or sounds, and the accuracy of nearest neighbours among held-out rows.

Legend: M rows of the global batch, N rows of a contrast or held-out rows, D and H embedding size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from declutr.common.errors import UsageError
from declutr.trainer.data.batches import Collator
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.objectives.base import (
    Gathered,
    HeldOutSplit,
    Objective,
    RowShard,
    Validator,
    tile_pairs,
    tile_rows,
    unit_rows,
)
from declutr.trainer.objectives.config import NN_ACCURACY, RunContext
from declutr.trainer.objectives.scores import HELD_OUT_EPOCH, compute_together, held_out_rows
from declutr.trainer.objectives.simcse import infonce
from declutr.trainer.objectives.supcon.clips import NUM_VIEWS
from declutr.trainer.objectives.supcon.collator import ClipCollator, label_keys
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig

_CHUNK = 32  # rows in one forward


def supcon(embeddings: Tensor, labels: Tensor, temperature: float, row_shard: RowShard | None = None) -> Tensor:
    """Mean over i of -1/|P_i| sum_{p in P_i} log(exp(s_ip) / sum_{a != i} exp(s_ia)), s_ij = cos(z_i, z_j) / t.

    L_out of Khosla et al. (2020), eq. 2. P_i are the other rows with the label of i, at least one. With each label on
    two rows it is NT-Xent. The loss and its gradient hold a few tiles of the N x N scores at a time. With a row shard,
    the gradient of other workers' rows is 0.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        rows = unit_rows(embeddings)
        size = tile_rows(rows.device)
        return _TiledSupCon.apply(rows, labels, temperature, size, row_shard)  # type: ignore[no-untyped-call]


class _TiledSupCon(torch.autograd.Function):
    """The loss of unit rows. Scores are symmetric, so a tile serves its rows and, without a row shard, its columns."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None
    ) -> Tensor:
        if row_shard is None:
            log_sums, positive, counts = _sums(rows, labels, temperature, size)
        else:
            log_sums, positive, counts = row_shard.complete(
                lambda: torch.stack(_sums(rows, labels, temperature, size, row_shard)), rows, numbers=3
            )
        ctx.save_for_backward(rows, labels, log_sums, counts)  # no scores: the backward computes tiles again
        ctx.settings = temperature, size, row_shard
        return (log_sums - positive / counts).mean()  # L_out: the mean over P_i is outside of the log

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, labels, log_sums, counts = ctx.saved_tensors
        temperature, size, row_shard = ctx.settings
        gradient = torch.zeros_like(rows)
        factor = upstream / (len(rows) * temperature)
        with torch.autocast(rows.device.type, enabled=False):
            for first, second, scores, same in _tiles(rows, labels, temperature, size, row_shard):
                pushes = (scores - log_sums[first, None]).exp_() - same / counts[first, None]
                pushes += (scores - log_sums[None, second]).exp_() - same / counts[None, second]
                pushes *= factor
                # On the diagonal, the transposed scores are in the same tile.
                gradient[first].addmm_(pushes, rows[second])
                if row_shard is None and second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
        return gradient, None, None, None, None


def _sums(
    rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(N,)` logsumexp of each row's scores, sum of its positives' scores, their number; or of a row shard alone."""
    log_sums = rows.new_full((len(rows),), torch.finfo(rows.dtype).min)
    positive, counts = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    for first, second, scores, same in _tiles(rows, labels, temperature, size, row_shard):
        for part, axis in ((first, 1), (second, 0)) if row_shard is None and first != second else ((first, 1),):
            torch.logaddexp(log_sums[part], scores.logsumexp(dim=axis), out=log_sums[part])
            positive[part] += scores.where(same, 0).sum(dim=axis)
            counts[part] += same.sum(dim=axis)
    return log_sums, positive, counts


def _tiles(
    rows: Tensor, labels: Tensor, temperature: float, size: int, row_shard: RowShard | None
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Tiles: scores, the lowest number for a row with itself, and the mask of positives."""
    for first, second in tile_pairs(len(rows), size, row_shard):
        scores = (rows[first] @ rows[second].T).div_(temperature)
        same = labels[first, None] == labels[None, second]  # P_i, here still with i itself
        if -scores.shape[0] < (offset := first.start - second.start) < scores.shape[1]:
            scores.diagonal(offset).fill_(torch.finfo(scores.dtype).min)
            same.diagonal(offset).fill_(False)
        yield first, second, scores, same


def nearest_accuracy(
    queries: Tensor,  # `(N, H)` first views
    candidates: Tensor,  # `(N, H)` second views
    labels: NDArray[np.int64] | None,  # `(N,)`; None: without
) -> float | None:
    """Share of rows whose nearest neighbour, by cosine, is right; ties count against the encoder.

    With labels, the neighbour of a row is another row, and right if it has the same label; rows with a label of their
    own are left out. Without, it is right if it is the other view of the same row.

    Returns:
        The share; None if no row has a right and a wrong neighbour.
    """
    scores = F.normalize(queries, dim=-1) @ F.normalize(candidates, dim=-1).T
    groups = torch.arange(len(scores)) if labels is None else torch.from_numpy(labels)
    same = groups[:, None] == groups
    different = ~same
    if labels is not None:
        same.fill_diagonal_(False)
    judged = same.any(dim=1) & different.any(dim=1)  # a row without a choice is always right, or always wrong
    right = scores.where(same, -torch.inf).amax(dim=1) > scores.where(different, -torch.inf).amax(dim=1)
    return float(right[judged].double().mean()) if bool(judged.any()) else None


@dataclass(frozen=True)
class NeighbourValidator:
    """Scores the encoder behind a task's frontend on held-out rows, shared among workers; without head and dropout."""

    collator: ClipCollator  # cuts rows into patches
    held_out: HeldOutSplit  # the held-out split
    rows: NDArray[np.int64]  # `(N,)` numbers of the rows to score
    labelled: bool  # true: whole images and sounds are compared by their labels. false: two views as in training.

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """The accuracy; empty if it says nothing about these rows, None if embeddings are not finite."""
        split = self.held_out
        table = split.shards.take(self.rows)
        epochs = np.full(len(table), HELD_OUT_EPOCH, np.int64)

        def embed(part: slice) -> Tensor:
            batch = self.collator.collate(self.views(table.slice(part.start, part.stop - part.start)), epochs[part])
            return encoder.embed(batch.spans.to(split.device), split.frontend).flatten().reshape(-1, NUM_VIEWS * width)

        width = encoder.output_size
        embeddings = compute_together(encoder, len(table), NUM_VIEWS * width, embed, split.comm, split.device, _CHUNK)
        if not bool(embeddings.isfinite().all()):
            return None
        first, second = embeddings.split(width, dim=1)
        accuracy = nearest_accuracy(first, second, label_keys(table) if self.labelled else None)
        return {} if accuracy is None else {NN_ACCURACY: accuracy}

    def views(self, rows: pa.Table) -> pa.Table:
        """Rows whose labels are compared, with whole images as views; others as they are."""
        return self.collator.fetch.whole(rows) if self.labelled and "image" in rows.column_names else rows


class Supcon(Objective[SupconConfig]):
    """The contrastive loss over `(M, 2, D)` views, with the labels of the data or without."""

    shards_rows = True

    def __init__(self, config: SupconConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.head: nn.Module = nn.Identity()
        if config.head:
            self.head = nn.Sequential(nn.Linear(embedding_size, embedding_size), nn.Tanh())
        if config.reference_supcon and config.labels:
            self.shards_rows = False  # that form needs the whole matrix of scores

    def collator(self, vocabulary: Vocabulary, max_content: int) -> Collator:
        """Builds the collator that cuts two views of each clip into patches."""
        del vocabulary, max_content
        if self.run.frontend is None:
            raise UsageError("objective supcon reads patches: a task with images or sounds has a frontend")
        return ClipCollator(self.config, self.run.frontend, self.run.seed)

    def validator(self, held_out: HeldOutSplit) -> Validator | None:
        """The accuracy of nearest neighbours; None without labels if the views of a sound differ by dropout alone."""
        config, content, frontend = self.config, held_out.shards.manifest.content, held_out.frontend
        labelled = getattr(content, "label", None) is not None
        masked = not config.masks.shared and (config.masks.freq_mask or config.masks.time_mask)
        if frontend is None or (content.kind == "audio" and not (labelled or masked)):
            return None
        # a label belongs to the whole clip alone
        plain = config.model_copy(update={"masks": MaskConfig()}) if labelled else config
        rows = held_out_rows(held_out.shards, held_out.max_documents, self.run.seed)
        return NeighbourValidator(ClipCollator(plain, frontend.config, self.run.seed), held_out, rows, labelled)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """L_out of Khosla et al. times t / base_temperature; or the released form."""
        config, labels = self.config, batch.facts["label"]
        first, second = self.head(batch.views).unbind(1)
        if config.reference_supcon and config.labels:
            # `new_supcon` of the released VisualCSE: the target of i is the rank of its label among those of the batch,
            # so it is i's own second view, or one of its class, only by chance (2% are the own view of 48 rows)
            scores = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
            loss = F.cross_entropy(scores / config.temperature, torch.unique(labels, return_inverse=True)[1])
        elif config.reference_supcon:
            loss = infonce(first, second, config.temperature, row_shard=batch.row_shard)
        else:
            groups = labels if config.labels else torch.arange(len(labels), device=labels.device)
            loss = supcon(torch.cat([first, second]), groups.repeat(2), config.temperature, row_shard=batch.row_shard)
            loss = loss * (config.temperature / config.base_temperature)  # as published
        return {"supcon": loss}
