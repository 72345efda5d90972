"""DeCLUTR: contrasts spans of the same document with all others, and predicts masked tokens of the anchors.

Legend: n documents on this rank, m their anchors (n * A, or fewer if documents are short), A anchors a document, P
positives an anchor, M anchors of the global batch, D embedding size, Q queued embeddings.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from declutr.common import seeding
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.objectives.base import (
    Gathered,
    HeldOutSplit,
    Objective,
    RowShard,
    tile_pairs,
    tile_rows,
    tiles_of,
    unit_rows,
)
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig, MetricLearningConfig, NTXentConfig
from declutr.trainer.objectives.declutr.spans import SpanCollator
from declutr.trainer.objectives.declutr.validator import SpanValidator
from declutr.trainer.objectives.scores import held_out_rows


def ntxent(
    embeddings: Tensor,  # `(2M, D)`, anchors first; row i and row i + M are each other's positive
    temperature: float,  # t
    queue: Tensor | None = None,  # `(Q, D)` embeddings of earlier steps, negatives for every row; no gradient
    # this worker's rows of M, whose gradient is computed, while that of others is 0; None: all.
    row_shard: RowShard | None = None,
    # `(M,)` integer keys of the anchors' documents; None: every other row is a negative.
    documents: Tensor | None = None,
) -> Tensor:
    """Mean over the 2M terms of -log(exp(s_ij/t) / sum_k exp(s_ik/t)), k over all but i and over the queue.

    With `documents`, k leaves out the rows of i's own document except its positive j.

    The loss and its gradient hold only a few tiles of the 2M x (2M + Q) scores at a time.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        rows = unit_rows(embeddings)
        old = rows.new_empty(0, rows.shape[-1]) if queue is None else F.normalize(queue.to(rows.dtype), dim=-1)
        owners = None if documents is None else documents.repeat(2)
        scores = _Scores(rows.detach(), old.detach(), temperature, tile_rows(rows.device), row_shard, owners)
        return _TiledNTXent.apply(rows, scores)  # type: ignore[no-untyped-call]


class _TiledNTXent(torch.autograd.Function):
    """NT-Xent of unit rows, term i as log(1 + exp(l_i - p_i)), l_i the logsumexp of i's negatives, p_i its positive.

    Unlike softmax minus one-hot, this form and its gradient keep their precision in float32 when the positive's score
    is by far the largest and the loss is almost 0. The scores are symmetric, so without a row shard a tile is used for
    its rows and, transposed, for its columns.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scores: "_Scores") -> Tensor:
        row_shard = scores.row_shard
        if row_shard is None:
            log_sums = scores.log_sums()
        else:
            (log_sums,) = row_shard.complete(lambda: scores.log_sums()[None], rows)
        anchors, positives = rows.chunk(2)
        positive = ((anchors * positives).sum(dim=1) / scores.temperature).repeat(2)
        ctx.save_for_backward(rows, log_sums, positive)
        ctx.scores = scores  # tiles are computed again in the backward, because M^2 scores may not fit
        return -F.logsigmoid(positive - log_sums).mean()  # the mean of eq. 1's 2M terms, as pytorch-metric-learning's

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        rows, log_sums, positive = ctx.saved_tensors
        scores: _Scores = ctx.scores
        with torch.autocast(rows.device.type, enabled=False):
            weights = torch.sigmoid(log_sums - positive) * (upstream / (len(rows) * scores.temperature))
            pulls = weights + weights.roll(len(rows) // 2)  # p_i is also the positive of i's partner
            gradient = -pulls[:, None] * rows.roll(len(rows) // 2, dims=0)
            for first, second, tile in scores.own():
                pushes = (tile - log_sums[first, None]).exp_().mul_(weights[first, None])
                pushes += tile.sub_(log_sums[None, second]).exp_().mul_(weights[None, second])
                gradient[first].addmm_(pushes, rows[second])
                if scores.row_shard is None and second != first:
                    gradient[second].addmm_(pushes.T, rows[first])
            for first, second, tile in scores.queued():
                pushes = tile.sub_(log_sums[first, None]).exp_().mul_(weights[first, None])
                gradient[first].addmm_(pushes, scores.queue[second])
        return gradient if scores.row_shard is None else scores.row_shard.only_own(gradient), None


@dataclass(frozen=True)
class _Scores:
    """Tiles of the scores of unit rows with each other and with the queue.

    A score that is no negative has the lowest finite number: that of a row with itself, with its positive and, if
    `owners` is given, with the other rows of its document.
    """

    rows: Tensor  # `(2M, D)`, anchors first
    queue: Tensor  # `(Q, D)`
    temperature: float  # divisor of the scores
    size: int  # rows and columns of a tile
    row_shard: RowShard | None  # this worker's rows; None: all
    owners: Tensor | None  # `(2M,)` keys of the rows' documents; None: rows of one document are negatives

    def log_sums(self) -> Tensor:
        """`(2M,)` logsumexp of each row's negatives; with a row shard, of its rows alone."""
        # The lowest finite number, not -inf: a row without negatives must have the gradient 0, not NaN.
        log_sums = self.rows.new_full((len(self.rows),), torch.finfo(self.rows.dtype).min)
        for first, second, scores in self.own():
            torch.logaddexp(log_sums[first], scores.logsumexp(dim=1), out=log_sums[first])
            if self.row_shard is None and second != first:
                torch.logaddexp(log_sums[second], scores.logsumexp(dim=0), out=log_sums[second])
        for first, _, scores in self.queued():
            torch.logaddexp(log_sums[first], scores.logsumexp(dim=1), out=log_sums[first])
        return log_sums

    def own(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of the scores of rows with each other; on the diagonal a tile holds both (i, k) and (k, i)."""
        apart = len(self.rows) // 2
        for first, second in tile_pairs(len(self.rows), self.size, self.row_shard):
            scores = (self.rows[first] @ self.rows[second].T).div_(self.temperature)
            for distance in (0, apart, -apart):  # column - row
                # Outside the tile there is nothing to exclude, and torch would raise an error.
                if -scores.shape[0] < (offset := distance + first.start - second.start) < scores.shape[1]:
                    scores.diagonal(offset).fill_(torch.finfo(scores.dtype).min)
            if self.owners is not None:
                same = self.owners[first, None] == self.owners[None, second]
                scores.masked_fill_(same, torch.finfo(scores.dtype).min)
            yield first, second, scores

    def queued(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of the scores of rows with queued embeddings."""
        length = len(self.rows)
        rows = tiles_of(0, length, self.size) if self.row_shard is None else self.row_shard.tiles(length, self.size)
        for first in rows:
            for second in tiles_of(0, len(self.queue), self.size):
                yield first, second, (self.rows[first] @ self.queue[second].T).div_(self.temperature)


def metric_learning_loss(config: MetricLearningConfig) -> Callable[[Tensor, int], Tensor]:
    """A pytorch-metric-learning loss, with its miner, of `(2M, D)` embeddings as those of `ntxent`, and of a seed."""
    from pytorch_metric_learning import losses, miners

    loss = getattr(losses, config.loss)(**config.loss_arguments)
    miner = getattr(miners, config.miner)(**config.miner_arguments) if config.miner else None
    if any(True for _ in loss.parameters()):
        raise ValueError("learns class weights, but documents have no classes; choose a loss without weights")

    def loss_of(embeddings: Tensor, seed: int) -> Tensor:
        labels = torch.arange(len(embeddings) // 2, device=embeddings.device).repeat(2)  # a class is a pair
        # Some draw from torch's global generator; every worker must draw the same, as it computes its rows' gradient.
        with torch.random.fork_rng(devices=[embeddings.device] if embeddings.is_cuda else []):
            torch.manual_seed(seed)
            return loss(embeddings, labels, None if miner is None else miner(embeddings, labels))

    return loss_of


def metric_learning_problems(config: MetricLearningConfig) -> list[str]:
    """Reports a loss or miner that rejects its arguments, or needs more than embeddings and their pairs."""
    try:
        metric_learning_loss(config)(torch.eye(4).repeat(2, 1), 0)
    except Exception as error:  # noqa: BLE001 - classes of others with arguments of the user: refused
        miner = f" with objective.loss.miner = {config.miner}" if config.miner else ""
        return [f"objective.loss.loss = {config.loss}{miner}: {type(error).__name__}: {error}"]
    return []


class Declutr(Objective[DeclutrConfig]):
    """The contrastive loss over `(M, 2, D)` views, each an anchor and the mean of its positives."""

    shards_rows = True

    def __init__(self, config: DeclutrConfig, run: RunContext, embedding_size: int) -> None:
        super().__init__(config, run, embedding_size)
        self.queue: Tensor | None = None
        self.remembers = config.queue_size > 0
        loss = config.loss
        self._metric_loss = metric_learning_loss(loss) if isinstance(loss, MetricLearningConfig) else None
        self.shards_rows = self.shards_rows and self._metric_loss is None

    def collator(self, vocabulary: Vocabulary, max_content: int) -> SpanCollator:
        """Builds the collator that draws, masks and packs the spans of documents."""
        return SpanCollator(self.config, self.run, vocabulary, max_content)

    def views(self, embeddings: Tensor, batch: RankBatch) -> Tensor:
        """`(m, 2, D)`: each anchor and its positives' mean (paper, 3.1), from `(S, D)` in the collator's order."""
        rows, spans_a_row = batch.num_rows, 1 + self.config.unmasked_anchors + self.run.spans.num_positives
        if len(embeddings) != rows * spans_a_row:
            raise ValueError(f"{len(embeddings)} spans do not match {rows} anchors with {spans_a_row} spans each")
        masked, rest = embeddings[:rows], embeddings[rows:]
        anchors, rest = (rest[:rows], rest[rows:]) if self.config.unmasked_anchors else (masked, rest)
        # after encoding, before the norm is taken, as released
        positives = rest.reshape(rows, self.run.spans.num_positives, embeddings.shape[-1]).mean(dim=1)
        return torch.stack([anchors, positives], dim=1)

    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """The contrastive loss of the global batch."""
        embeddings = _anchors_first(batch.views)
        if self._metric_loss is not None:
            value = self._metric_loss(embeddings, seeding.torch_seed(batch.seed, "metric learning", batch.step))
        else:
            assert isinstance(self.config.loss, NTXentConfig)
            value = ntxent(
                embeddings,
                self.config.loss.temperature,
                None if self.queue is None else batch.cut(self.queue),
                row_shard=batch.row_shard,
                documents=batch.facts.get("document"),
            )
        if self.config.reference_rank_scaling:
            divided = value / self.config.reference_rank_scaling  # released: DDP averaged 1 / W of the gradient
            value = divided + (value - divided).detach()  # the value is logged undivided
        return {"contrastive": value}

    def remember(self, batch: Gathered) -> None:
        """Appends a finished step's `(2M, D)` embeddings to the queue, and drops the oldest ones."""
        values = _anchors_first(batch.views)
        queue = values if self.queue is None else torch.cat([self.queue, values])
        self.queue = queue[-self.config.queue_size :].clone()  # a copy frees the dropped rows

    def validator(self, held_out: HeldOutSplit) -> SpanValidator:
        """Builds the validator: retrieval of unmasked spans of the same document, even if only MLM is trained.

        The touching pair is an anchor and a positive that touches it. The distant pair comes from `place_distant`. The
        spans of a pair do not overlap.
        """
        lengths = {"min_tokens": self.run.spans.min_tokens, "max_tokens": self.run.spans.max_tokens}
        pair = replace(self.run, spans=SpanConfig(num_anchors=1, num_positives=1, strategy="adjacent", **lengths))
        collator = SpanCollator(DeclutrConfig(terms="contrastive"), pair, held_out.vocabulary, held_out.max_content)
        rows = held_out_rows(held_out.shards, held_out.max_documents, self.run.seed)
        return SpanValidator(collator, held_out, rows, sizes=self.sizes)

    def state(self) -> dict[str, Tensor]:
        """The queue, once it exists."""
        return {} if self.queue is None else {"queue": self.queue}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the queue unless it is longer than `queue_size`."""
        if unexpected := sorted(state.keys() - {"queue"}):
            raise RuntimeError(f"unexpected {', '.join(unexpected[:3])}")
        queue = state.get("queue")
        self.queue = queue if queue is not None and len(queue) <= self.config.queue_size else None


def _anchors_first(views: Tensor) -> Tensor:
    """`(2M, D)` from `(M, 2, D)`: all anchors, then all positives."""
    return torch.cat([views[:, 0], views[:, 1]])
