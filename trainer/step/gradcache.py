"""One rank's part of the gradient of the global batch's loss: one forward or, if it does not fit, two passes.

The two passes follow GradCache (Gao et al. 2021). The first computes embeddings without a graph. The second repeats
each piece with its graph and the same dropout, and applies the gradient of the loss with respect to the embeddings. The
number of tokens in a piece (`Microbatch`) affects memory, never results.

With `scaling.elastic_determinism`, sums must not depend on the number of workers. Then each canonical microbatch has a
separate forward and backward, and its gradient is a separate term of the sums (trainer/parallel/reducers.py). The loss
is computed from the embeddings of all, whole and the same on every worker.

What an objective gives in a step (facts, dropout keys, terms) is checked for mistakes that no loss curve shows.

Legend: M rows of views of the global batch, D embedding size.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from declutr.common import seeding
from declutr.common.errors import UsageError
from declutr.trainer.data.batches import AnyBatch, RankBatch, canonical_microbatches
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
SPREAD = ("batch_uniformity", "batch_participation_ratio")  # names of the numbers of `spread` in the metrics
_MLM_STEP = 2.0**-20  # losses are rounded to its multiples: below 2^33, sums of those are exact in float64
_SPREAD_ROWS = 256  # enough for both numbers, and few enough to cost nothing next to a step


class MicrobatchError(RuntimeError):
    """Memory is too small for a single span."""


@dataclass
class Microbatch:
    """Limit of the tokens in one forward, lowered during training if it is automatic."""

    max_tokens: int | None = None  # the limit; None: a worker's whole share at once
    automatic: bool = False  # lower `max_tokens` and repeat the step when memory runs out

    @staticmethod
    def of(setting: int | Literal["auto"] | None, device: torch.device) -> "Microbatch":
        """Builds the limit from the setting `microbatch_tokens`; "auto" starts without a limit on a GPU."""
        if setting == "auto":
            return Microbatch(_CPU_TOKENS if device.type == "cpu" else None, automatic=True)
        return Microbatch(setting)

    def lower(self, spans: AnyBatch, comm: Communicator) -> None:
        """Halves the limit of all workers after one ran out of memory in a step."""
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


def batch_problem(objective: Objective[Any], batch: RankBatch) -> str | None:
    """The reason why facts cannot be gathered, or why views that must differ by dropout do not; or None."""
    for name, values in batch.facts.items():
        if values.dtype != torch.int64 or values.shape != (batch.num_rows,):
            return (
                f"the fact {name!r} is {values.dtype} of shape {list(values.shape)}; it must be torch.int64 of shape "
                f"[{batch.num_rows}], one number for each row"
            )
    if (objective.config.needs_dropout or objective.config.sets_rates) and batch.views_alike:
        return "all views of a row have the same dropout key, so their masks are not independent; number the spans"
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
        return (
            f"has terms {sorted(unknown)}; add losses to its config.metrics; other figures would be added to the loss"
        )
    if "mlm" in terms:
        return "has the term 'mlm', which the trainer computes; rename it"
    if views.requires_grad and not any(value.requires_grad for value in terms.values()):
        return f"has no gradient with respect to the views in any of its terms {sorted(terms)}; do not detach them"
    return None


@contextmanager
def float32_products() -> Iterator[None]:
    """Float32 products whatever TF32 says: scores with 10 correct bits would be divided by a temperature of .05."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class GlobalCounts:
    """Totals over all ranks, which may have different numbers of rows."""

    selected: int  # selected tokens of all ranks
    first_row: int  # place of this rank's first row of views among all
    num_rows: int  # M; 0 if the loss uses no embeddings


@dataclass(frozen=True)
class Gradients:
    """Results of a backward other than the gradients."""

    terms: dict[str, Tensor]  # terms of the objective's loss on the global batch, by name
    mlm_sum: Tensor  # this rank's MLM loss, summed over its selected tokens
    num_selected: int  # selected tokens of all ranks
    gathered: Gathered | None  # detached views of the global batch; None unless the objective needs them for `remember`
    # `(2,)` float64, spread of the views (trainer/objectives/scores.py); None if the loss uses none.
    spread: Tensor | None


@dataclass(frozen=True)
class GradCache:
    """Both passes of a step."""

    task: "TrainTask"  # the task
    step: int  # 1-based optimizer step
    batch: RankBatch  # this rank's share of the batch
    pieces: list[AnyBatch]  # its microbatches

    def count(self, failed: bool = False) -> GlobalCounts | None:
        """Totals over all ranks, by one all-reduce; None on every rank if one of them has `failed`."""
        batch, size, rank = self.batch, self.task.comm.size, self.task.comm.rank
        own = [0] * 2 * size
        problem = batch_problem(self.task.objective, batch)
        names_code = zlib.crc32(repr(list(batch.facts)).encode()) & 0x7FFF_FFFF  # of the facts, in their order
        # a place for each rank: one sum tells all ranks everything
        own[rank], own[size + rank] = batch.num_rows, -1 if problem else names_code
        failures, selected, *by_rank = self.task.comm.all_reduce_counts([int(failed), len(batch.spans.labels), *own])
        rows, codes = by_rank[:size], by_rank[size:]
        if problem or len(set(codes)) > 1:
            names = ", ".join(batch.facts) or "none"
            raise UsageError(
                f"objective {self.task.objective.config.kind}: "
                f"{problem or f'the facts of the collator differ between workers; worker {rank} has {names}'}. "
                "Correct `collate`, which must give the same facts for any number of rows, also 0"
            )
        return None if failures else GlobalCounts(selected, sum(rows[:rank]), sum(rows))

    def embed(self) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece, with their graphs if they are kept; else the embeddings alone."""
        pieces, kept = self.pieces, self._keeps_graphs()
        if not kept and not self.task.objective.config.embeds:
            return []  # the loss does not combine pieces, so one pass is enough
        with torch.set_grad_enabled(kept):
            if not kept:  # the second pass predicts
                pieces = [piece.unselected() for piece in pieces]
            return [self._forward(piece, number) for number, piece in enumerate(pieces)]

    def _keeps_graphs(self) -> bool:
        """True if the backward of each piece uses the graph of `embed`; False if it computes the piece again."""
        task, limit = self.task, self.task.microbatch.max_tokens
        if task.reducer is None or task.encoder.config.activation_checkpointing:
            return len(self.pieces) == 1  # a recomputation uses the dropout keys of the latest forward
        return limit is None or sum(piece.num_tokens for piece in self.pieces) <= limit

    def differentiate(self, embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts) -> Gradients:
        """Accumulates this rank's part of the gradient, after `embed`.

        Without a share, every rank computes the whole gradient of the objective's parameters. Only the first rank keeps
        it, so that the sum over ranks counts it once.
        """
        reducer = self.task.reducer
        share = self.task.weight * self.task.objective.config.mlm_weight / max(1, counts.selected)
        # the loss is the same on every rank, so one of them adds the gradient of the objective's parameters
        with nullcontext() if reducer is None or not self.task.comm.rank else reducer.ignoring():
            terms, gradient, gathered, spread = self._through_loss(embedded, counts)
        mlm_sum = self._second_pass(gradient, share, embedded)
        if self.task.comm.rank and self._row_shard(counts) is None:
            for parameter in self.task.objective.parameters():
                parameter.grad = None  # of ranks but the first: replicated layers must not add up
        return Gradients(terms, mlm_sum, counts.selected, gathered, spread)

    def _second_pass(
        self,
        gradient: Tensor | None,  # `(S, D)`, of the loss with respect to the span embeddings; None: it uses none
        share: float,  # factor of the MLM loss
        # embeddings and MLM loss of each piece, with their graphs, released one by one; empty: they are computed again.
        kept: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Backward of each piece; the sum of the MLM losses."""
        pieces = self.pieces
        upstream = [None] * len(pieces) if gradient is None else gradient.split([piece.num_spans for piece in pieces])
        total = torch.zeros((), device=pieces[0].device)
        for number, (piece, gradient_part) in enumerate(zip(pieces, upstream, strict=True)):
            spans, mlm_sum = kept[number] if kept else self._forward(piece, number)
            if kept:
                kept[number] = spans.detach(), mlm_sum.detach()  # releases the graph once this backward is done
            through_spans = 0.0 if gradient_part is None else (spans * gradient_part).sum()
            if number == len(pieces) - 1 and self.task.overlap is not None:
                self.task.overlap.arm()  # sums of gradients that start in the last backward may start
            backward(through_spans + mlm_sum * share)
            mlm_sum = mlm_sum.detach()
            if self.task.reducer is not None:  # so that the order of the pieces has no effect on the sum
                mlm_sum = (mlm_sum.double() / _MLM_STEP).round() * _MLM_STEP
            total = total + mlm_sum
        return total

    def _through_loss(
        self, embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts
    ) -> tuple[dict[str, Tensor], Tensor | None, Gathered | None, Tensor | None]:
        """The loss terms, their gradient with respect to this rank's span embeddings, views to remember, their spread.

        All other memory of the loss is released on return, because the second pass needs it.
        """
        if not embedded:
            return {}, None, None, None
        cached = torch.cat([spans.detach() for spans, _ in embedded])
        if not self._keeps_graphs():
            embedded.clear()  # the copy in `cached` is enough
        cached.requires_grad_(True)  # a leaf: the graph ends here, and the second pass continues it
        with float32_products():
            terms, gathered, spread = self._loss(cached, counts)
            backward(self._total(terms, cached))
        return {name: value.detach() for name, value in terms.items()}, cached.grad, gathered, spread

    def _loss(self, spans: Tensor, counts: GlobalCounts) -> tuple[dict[str, Tensor], Gathered | None, Tensor | None]:
        """The loss terms of the global batch, from this rank's span embeddings, the views to remember, their spread."""
        if not self.task.objective.config.embeds:
            return {}, None, None
        batch, views, total = self.batch, self._views(spans), counts.num_rows
        shape = (batch.num_rows, self.task.objective.num_views)
        if views.dim() != 3 or views.shape[:2] != shape:
            raise UsageError(
                f"objective {self.task.objective.config.kind}: `views` returned the shape {list(views.shape)}, not "
                f"[{shape[0]}, {shape[1]}, D]: `num_rows` of the batch, `num_views` of the objective, and the size"
            )
        if batch.num_rows and spans.requires_grad and torch.is_grad_enabled() and not views.requires_grad:
            raise UsageError(f"objective {self.task.objective.config.kind}: `views` has no gradient; detach nothing")
        table = self.task.comm.all_gather(views.flatten(1), counts.first_row, total).view(total, *views.shape[1:])
        if torch.is_grad_enabled() and not table.requires_grad:  # a rank without rows finds detached terms as others do
            table.requires_grad_()
        gathered = Gathered(
            table,
            {name: self.task.comm.all_gather(values, counts.first_row, total) for name, values in batch.facts.items()},
            self.task.seed,
            self.step,
            self._row_shard(counts),
        )
        terms = self.task.objective.terms(gathered)
        if gathered.row_shard is not None and gathered.row_shard.failures:
            raise gathered.row_shard.failures.pop()  # not kept: a cycle would hold the memory of the loss
        if problem := terms_problem(terms, self.task.objective.config.metrics, gathered.views):
            raise UsageError(f"objective {self.task.objective.config.kind}: `loss` {problem}")
        return terms, gathered.detach() if self.task.objective.remembers else None, spread(table)

    def _views(self, spans: Tensor) -> Tensor:
        """Views of this rank's rows, `(m, V, D)`; those of each canonical microbatch are computed alone."""
        if self.task.reducer is None:
            return self.task.objective.views(spans, self.batch)
        microbatches = canonical_microbatches(self.batch)
        parts = spans.split([microbatch.spans.num_spans for microbatch in microbatches])
        views = torch.cat(
            [self.task.objective.views(part, microbatch) for part, microbatch in zip(parts, microbatches, strict=True)]
        )
        return views + 0.0  # a gather by sums turns -0 into 0, and one worker gathers nothing

    def _row_shard(self, counts: GlobalCounts) -> RowShard | None:
        """This rank's share of the loss; None if every rank computes all of it."""
        if self.task.reducer is not None:  # sums within shares would depend on the number of workers
            return None
        views = counts.num_rows * self.task.objective.num_views
        # below it, the exchange costs more than the scores
        if self.task.comm.size == 1 or not self.task.objective.shards_rows or views <= self.task.shared_rows:
            return None
        return RowShard(self.task.comm, counts.first_row, counts.first_row + self.batch.num_rows, counts.num_rows)

    def _total(self, terms: dict[str, Tensor], like: Tensor) -> Tensor:
        """The sum of the terms with the task's weight; 0 without terms."""
        total = reduce(add, terms.values()) if terms else like.new_zeros(())
        return total if self.task.weight == 1 else total * self.task.weight

    def _forward(self, piece: AnyBatch, number: int) -> tuple[Tensor, Tensor]:
        """Embeddings and MLM loss of a microbatch.

        Dropout is keyed by token (trainer/model/dropout.py). Only values that a family drops by functions of torch
        use torch's generator. It is seeded with (seed, step, rank, microbatch), so that the second pass repeats the
        first; for canonical microbatches as on one worker that has all of them.
        """
        device, task, rank = piece.device, self.task, self.task.comm.rank
        if task.reducer is not None:
            rank, number = 0, number + (self.batch.canonical[0].number if self.batch.canonical else 0)
        autocast = torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast:
            torch.manual_seed(seeding.torch_seed(self.task.seed, "dropout", self.step, rank, number))
            embeddings, mlm_sum = task.encoder(piece, *(() if task.frontend is None else (task.frontend,)))
        return embeddings, mlm_sum


def backward(loss: Tensor) -> None:
    """Runs backward if there is a graph. A rank without documents or without selected tokens may have none."""
    if loss.requires_grad:
        loss.backward()


def spread(
    views: Tensor,  # `(M, V, D)` views of the global batch
) -> Tensor:
    """`(2,)` float64: uniformity and participation ratio of the first views of at most 256 rows; NaN of one row.

    The participation ratio (sum of eigenvalues)^2 / sum of their squares of the covariance is the number of dimensions
    that the batch uses. It needs no singular values, for which a GPU would wait.
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
