"""One rank's part of the gradient of the global batch's loss: one forward or, if it does not fit, two passes.

The two passes follow GradCache (Gao et al. 2021). The first computes embeddings without a graph. The second repeats
each piece with its graph and the same dropout, and applies the gradient of the loss with respect to the embeddings. The
number of tokens in a piece (`Microbatch`) affects memory, never results.

What an objective gives in a step (facts, dropout keys, terms) is checked for mistakes that no loss curve shows.

Legend: M rows of views of the global batch, D embedding size.
"""

import zlib
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from declutr.common import seeding
from declutr.common.errors import UsageError
from declutr.trainer.data.batches import AnyBatch, RankBatch
from declutr.trainer.objectives.base import Gathered, Objective, RowShard
from declutr.trainer.parallel.communicator import Communicator

if TYPE_CHECKING:
    from declutr.trainer.step.task import TrainTask

# On a CPU larger forwards are not faster, and when memory runs out, the kernel kills the process without an error.
_CPU_TOKENS = 8192
# Libraries that allocate without torch's allocator report a failure with an error of another type.
_FAILED_ALLOCATIONS = (
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL
    "Cuda failure 'out of memory'",  # NCCL before 2.19
)
SPREAD = ("batch_uniformity", "batch_participation_ratio")
"""Names of the numbers of `spread` in the metrics."""
_SPREAD_ROWS = 256  # enough for both numbers, and few enough to cost nothing next to a step


class MicrobatchError(RuntimeError):
    """Memory is too small for a single span."""


@dataclass
class Microbatch:
    """Limit of the tokens in one forward, lowered during training if it is automatic.

    Attributes:
        max_tokens: the limit; None: a worker's whole share at once.
        automatic: lower `max_tokens` and repeat the step when memory runs out.
    """

    max_tokens: int | None = None
    automatic: bool = False

    @staticmethod
    def of(setting: int | Literal["auto"] | None, device: torch.device) -> "Microbatch":
        """Builds the limit from the setting `microbatch_tokens`; "auto" starts without a limit on a GPU."""
        if setting == "auto":
            return Microbatch(_CPU_TOKENS if device.type == "cpu" else None, automatic=True)
        return Microbatch(setting)

    def cut(self, spans: AnyBatch) -> list[AnyBatch]:
        """The microbatches of a worker's share."""
        return list(spans.microbatches(self.max_tokens))

    def lower(self, spans: AnyBatch, comm: Communicator) -> None:
        """Halves the limit of all workers after one ran out of memory in a step.

        Raises:
            MicrobatchError: the limit is already at the longest span.
        """
        longest = comm.all_reduce_max(int(spans.lengths.max()) if spans.num_spans else 0)
        tried = comm.all_reduce_max(spans.num_tokens if self.max_tokens is None else self.max_tokens)
        if tried <= longest:
            raise MicrobatchError(
                f"memory is too small for one span of {longest} tokens; use shorter spans (spans.max_tokens), "
                "a smaller encoder, precision: bf16 or encoder.activation_checkpointing: true"
            )
        self.max_tokens = max(longest, tried // 2)  # the same on all workers, or their exchanges would not match
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # blocks of the old sizes would stay reserved


def out_of_memory(error: RuntimeError) -> bool:
    """True if this error is a failed allocation: on a GPU, by torch or a library, or (under a limit) on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(phrase in str(error) for phrase in _FAILED_ALLOCATIONS)


def facts_problem(batch: RankBatch) -> str | None:
    """The reason why facts cannot be gathered with the rows of this rank, or None."""
    for name, values in batch.facts.items():
        if values.dtype != torch.int64 or values.shape != (batch.num_rows,):
            return (
                f"the fact {name!r} is {values.dtype} of shape {list(values.shape)}; it must be torch.int64 of shape "
                f"[{batch.num_rows}], one number for each row"
            )
    return None


def terms_problem(terms: Any, metrics: tuple[str, ...], views: Tensor) -> str | None:
    """The reason why an objective's terms cannot be trained or recorded, or None."""
    if not isinstance(terms, dict) or not terms:
        return f"returned {terms!r}; it must return a dict of one term or more"
    for name, value in terms.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            description = f"a {value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            return f"returned the term {name!r} as {description}; it must be a scalar tensor of floats"
    if unknown := set(terms) - set(metrics):
        return f"has terms {sorted(unknown)}; add them to its config.metrics"
    if "mlm" in terms:
        return "has the term 'mlm', which the trainer computes; rename it"
    if views.requires_grad and not any(value.requires_grad for value in terms.values()):
        return f"has no gradient with respect to the views in any of its terms {sorted(terms)}; do not detach them"
    return None


def keys_problem(objective: Objective[Any], batch: RankBatch) -> str | None:
    """The reason why views that must differ by dropout do not, or None."""
    config = objective.config
    if not (config.needs_dropout or config.sets_rates) or not batch.num_rows or batch.spans.keys is None:
        return None
    if not batch.views_alike:
        return None
    return "all views of a row have the same dropout key, so their masks are not independent; number the spans"


@dataclass(frozen=True)
class GlobalCounts:
    """Totals over all ranks, which may have different numbers of rows.

    Attributes:
        selected: selected tokens of all ranks.
        first_row: place of this rank's first row of views among all.
        num_rows: M; 0 if the loss uses no embeddings.
    """

    selected: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class Gradients:
    """Results of a backward other than the gradients.

    Attributes:
        terms: terms of the objective's loss on the global batch, by name.
        mlm_sum: this rank's MLM loss, summed over its selected tokens.
        num_selected: selected tokens of all ranks.
        gathered: detached views of the global batch; None unless the objective needs them for `remember`.
        spread: `(2,)` float64, spread of the views (trainer/objectives/scores.py); None if the loss uses none.
    """

    terms: dict[str, Tensor]
    mlm_sum: Tensor
    num_selected: int
    gathered: Gathered | None
    spread: Tensor | None


@dataclass(frozen=True)
class GradCache:
    """Both passes of a step.

    Attributes:
        task: the task.
        step: 1-based optimizer step.
    """

    task: "TrainTask"
    step: int

    @property
    def objective(self) -> Objective[Any]:
        """The loss on the views of the global batch."""
        return self.task.objective

    @property
    def comm(self) -> Communicator:
        """The workers."""
        return self.task.comm

    def count(self, batch: RankBatch, failed: bool = False) -> GlobalCounts | None:
        """Totals over all ranks, by one all-reduce; None on every rank if one of them has `failed`.

        Raises:
            UsageError: the collator's facts do not fit its rows, or their names differ between ranks; or the views
                of a row share a dropout key although they must differ by dropout.
        """
        size, rank = self.comm.size, self.comm.rank
        own = [0] * 2 * size
        problem = facts_problem(batch) or keys_problem(self.objective, batch)
        names_code = zlib.crc32(repr(list(batch.facts)).encode()) & 0x7FFF_FFFF  # of the facts, in their order
        # a place for each rank: one sum tells all ranks everything
        own[rank], own[size + rank] = batch.num_rows, -1 if problem else names_code
        failures, selected, *by_rank = self.comm.all_reduce_counts([int(failed), len(batch.spans.labels), *own])
        rows, codes = by_rank[:size], by_rank[size:]
        if problem or len(set(codes)) > 1:
            names = ", ".join(batch.facts) or "none"
            raise UsageError(
                f"objective {self.objective.config.kind}: "
                f"{problem or f'the facts of the collator differ between workers; worker {rank} has {names}'}. "
                "Correct `collate`, which must give the same facts for any number of rows, also 0"
            )
        return None if failures else GlobalCounts(selected, sum(rows[:rank]), sum(rows))

    def embed(self, pieces: list[AnyBatch]) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece, with their graph; of several pieces the embeddings alone."""
        if len(pieces) > 1 and not self.objective.config.embeds:
            return []  # the loss does not combine pieces, so one pass is enough
        with torch.set_grad_enabled(len(pieces) == 1):
            if len(pieces) > 1:  # the second pass predicts
                pieces = [piece.unselected() for piece in pieces]
            return [self._forward(piece, number) for number, piece in enumerate(pieces)]

    def differentiate(
        self, batch: RankBatch, pieces: list[AnyBatch], embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts
    ) -> Gradients:
        """Accumulates this rank's part of the gradient, after `embed`.

        Without a share, every rank computes the whole gradient of the objective's parameters. Only the first rank keeps
        it, so that the sum over ranks counts it once.
        """
        gradients = self._differentiate(batch, pieces, embedded, counts)
        if self.comm.rank and self._row_shard(batch, counts) is None:
            for parameter in self.objective.parameters():
                parameter.grad = None  # of ranks but the first: replicated layers must not add up
        return gradients

    def _differentiate(
        self, batch: RankBatch, pieces: list[AnyBatch], embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts
    ) -> Gradients:
        share = self.task.weight * self.objective.config.mlm_weight / max(1, counts.selected)
        if len(pieces) == 1:
            spans, mlm_sum = embedded[0]
            terms, gathered, spread = self._loss(spans, batch, counts)
            self._before_last()
            backward(self._total(terms, spans) + mlm_sum * share)
            return Gradients(_detached(terms), mlm_sum.detach(), counts.selected, gathered, spread)
        terms, gradient, gathered, spread = self._through_loss(embedded, batch, counts)
        mlm_sum = self._second_pass(pieces, gradient, share, [])
        return Gradients(terms, mlm_sum, counts.selected, gathered, spread)

    def _second_pass(
        self, pieces: list[AnyBatch], gradient: Tensor | None, share: float, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Backward of each piece; the sum of the MLM losses.

        Args:
            pieces: the pieces.
            gradient: `(S, D)`, of the loss with respect to the span embeddings; None: it uses none.
            share: factor of the MLM loss.
            kept: embeddings and MLM loss of each piece, with their graphs, released one by one; empty: they are
                computed again.
        """
        upstream = [None] * len(pieces) if gradient is None else gradient.split([piece.num_spans for piece in pieces])
        total = torch.zeros((), device=pieces[0].device)
        for number, (piece, gradient_part) in enumerate(zip(pieces, upstream, strict=True)):
            spans, mlm_sum = kept[number] if kept else self._forward(piece, number)
            if kept:
                kept[number] = spans.detach(), mlm_sum.detach()  # releases the graph once this backward is done
            through_spans = 0.0 if gradient_part is None else (spans * gradient_part).sum()
            if number == len(pieces) - 1:
                self._before_last()
            backward(through_spans + mlm_sum * share)
            total = total + self._addend(mlm_sum.detach())
        return total

    def _addend(self, mlm_sum: Tensor) -> Tensor:
        """The MLM loss of a piece as it is added to those of others."""
        return mlm_sum

    def _through_loss(
        self, embedded: list[tuple[Tensor, Tensor]], batch: RankBatch, counts: GlobalCounts
    ) -> tuple[dict[str, Tensor], Tensor | None, Gathered | None, Tensor | None]:
        """The loss terms, their gradient with respect to this rank's span embeddings, views to remember, their spread.

        All other memory of the loss is released on return, because the second pass needs it.
        """
        if not embedded:
            return {}, None, None, None
        cached = torch.cat([spans for spans, _ in embedded])
        embedded.clear()  # the copy in `cached` is enough
        cached.requires_grad_(True)  # a leaf: the graph ends here, and the encoder runs again
        terms, gathered, spread = self._loss(cached, batch, counts)
        backward(self._total(terms, cached))
        return _detached(terms), cached.grad, gathered, spread

    def _loss(
        self, spans: Tensor, batch: RankBatch, counts: GlobalCounts
    ) -> tuple[dict[str, Tensor], Gathered | None, Tensor | None]:
        """The loss terms of the global batch, from this rank's span embeddings, the views to remember, their spread."""
        if not self.objective.config.embeds:
            return {}, None, None
        views, total = self._views(spans, batch), counts.num_rows
        shape = (batch.num_rows, self.objective.num_views)
        if views.dim() != 3 or views.shape[:2] != shape:
            raise ValueError(
                f"objective {self.objective.config.kind}: `views` returned the shape {list(views.shape)}, not "
                f"[{shape[0]}, {shape[1]}, D]: `num_rows` of the batch, `num_views` of the objective, and the size"
            )
        table = self.comm.all_gather(views.flatten(1), counts.first_row, total).view(total, *views.shape[1:])
        if torch.is_grad_enabled() and not table.requires_grad:  # a rank without rows finds detached terms as others do
            table.requires_grad_()
        gathered = Gathered(
            table,
            {name: self.comm.all_gather(values, counts.first_row, total) for name, values in batch.facts.items()},
            self.task.seed,
            self.step,
            self._row_shard(batch, counts),
        )
        terms = self.objective.terms(gathered)
        if problem := terms_problem(terms, self.objective.config.metrics, gathered.views):
            raise UsageError(f"objective {self.objective.config.kind}: `loss` {problem}")
        return terms, gathered.detach() if self.objective.remembers else None, spread(table)

    def _views(self, spans: Tensor, batch: RankBatch) -> Tensor:
        """Views of this rank's rows, `(m, V, D)`."""
        return self.objective.views(spans, batch)

    def _stream(self, number: int) -> tuple[int, int]:
        """Rank and number of a microbatch that key torch's generator."""
        return self.comm.rank, number

    def _row_shard(self, batch: RankBatch, counts: GlobalCounts) -> RowShard | None:
        """This rank's share of the loss; None if every rank computes all of it."""
        views = counts.num_rows * self.objective.num_views
        # below it, the exchange costs more than the scores
        if self.comm.size == 1 or not self.objective.shards_rows or views <= self.task.shared_rows:
            return None
        return RowShard(self.comm, counts.first_row, counts.first_row + batch.num_rows, counts.num_rows)

    def _total(self, terms: dict[str, Tensor], like: Tensor) -> Tensor:
        """The sum of the terms with the task's weight; 0 without terms."""
        total = reduce(add, terms.values()) if terms else like.new_zeros(())
        return total if self.task.weight == 1 else total * self.task.weight

    def _forward(self, piece: AnyBatch, number: int) -> tuple[Tensor, Tensor]:
        """Embeddings and MLM loss of a microbatch.

        Dropout is keyed by token (trainer/model/dropout.py). Only values that a family drops by functions of torch
        use torch's generator. It is seeded with (seed, step, rank, microbatch), so that the second pass repeats the
        first.
        """
        device, task = piece.device, self.task
        autocast = torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast:
            torch.manual_seed(seeding.torch_seed(self.task.seed, "dropout", self.step, *self._stream(number)))
            embeddings, mlm_sum = task.encoder(piece, *(() if task.frontend is None else (task.frontend,)))
        return embeddings, mlm_sum

    def _before_last(self) -> None:
        """Before the last backward: sums of gradients that start in it may start."""
        if self.task.overlap is not None:
            self.task.overlap.arm()


def _detached(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in terms.items()}


def backward(loss: Tensor) -> None:
    """Runs backward if there is a graph. A rank without documents or without selected tokens may have none."""
    if loss.requires_grad:
        loss.backward()


def spread(views: Tensor) -> Tensor:
    """`(2,)` float64: uniformity and participation ratio of the first views of at most 256 rows; NaN of one row.

    The participation ratio (sum of eigenvalues)^2 / sum of their squares of the covariance is the number of dimensions
    that the batch uses. It needs no singular values, for which a GPU would wait.

    Args:
        views: `(M, V, D)` views of the global batch.
    """
    with torch.no_grad(), torch.autocast(views.device.type, enabled=False):
        unit = F.normalize(views[:_SPREAD_ROWS, 0].detach().float(), dim=-1)
        number = len(unit)
        centred = unit - unit.mean(dim=0)  # at most 256 rows: M x M is smaller than D x D
        # exp(-2 |x - y|^2) of unit vectors; it is 1 for each row with itself
        pairs = (4 * (unit @ unit.T) - 4).exp().sum() - number
        uniformity = (pairs / (number * (number - 1) or torch.nan)).log()
        gram = centred @ centred.T
        ratio = gram.diagonal().sum().square() / gram.square().sum()
        return torch.stack([uniformity, ratio]).double()
