"""The interface of an objective: rows of shards to packed spans, and gathered embeddings to a loss.

The encoder, pooling and MLM head run on each worker, per microbatch, and their gradients are summed over workers. The
views of all workers are then gathered, and the loss runs once on the views of the global batch, identically on every
worker and in at least float32. Therefore a layer of the objective, such as a projector with BatchNorm, sees the global
batch, gradient caching is exact, and the gradients of such layers are counted once.

A large contrast is shared (`RowShard`). The gradient with respect to a row needs the scores of that row and one number
of every other row, its log-sum. Workers exchange the log-sums. Then each computes the complete gradient of its rows,
and no gradients are exchanged. With M rows and W workers, a worker computes M^2 / W scores.

Legend: S spans and m rows of a worker, M rows of the global batch, V views of a row, D embedding size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from declutr.common.errors import UsageError as UsageError
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import Collator, RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext
from declutr.trainer.parallel.communicator import Communicator

SHARED_ROWS = 1024
"""Most rows of a contrast that every worker computes whole. The scores of fewer rows cost less than an exchange: a
share cannot use their symmetry, so that two workers save only a quarter."""
_CPU_TILE = 1024  # 4 MiB of scores in float32; larger products are hardly faster
_GPU_TILE = 4096  # 64 MiB; smaller products leave most of a GPU idle


def tile_rows(device: torch.device) -> int:
    """Rows and columns of the scores that are computed at a time."""
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def tiles_of(start: int, end: int, size: int) -> list[slice]:
    """Cuts [start, end) into slices of at most `size`."""
    return [slice(first, min(first + size, end)) for first in range(start, end, size)]


@dataclass(frozen=True)
class RowShard:
    """The rows that a worker computes, in tables with one or more blocks of `total` rows, such as one for each view.

    Attributes:
        comm: the workers.
        start: first row of this worker in a block.
        end: row after its last.
        total: rows of a block, M.
        failures: the error after which this worker's numbers are NaN, to be raised after all exchanges of the loss.
    """

    comm: Communicator
    start: int
    end: int
    total: int
    failures: list[RuntimeError] = field(default_factory=list)

    def tiles(self, length: int, size: int) -> list[slice]:
        """This worker's rows of a table of `length` rows, in slices of at most `size`."""
        blocks = range(0, length, self.total)
        return [part for block in blocks for part in tiles_of(block + self.start, block + self.end, size)]

    def complete(self, compute: Callable[[], Tensor], like: Tensor, numbers: int = 1) -> Tensor:
        """Numbers `(n, k M)` of all rows, from those of each worker's rows.

        If a worker's memory runs out, it takes part in this exchange and later ones with NaN, so that no other waits.

        Args:
            compute: returns `(n, k M)`, in which this worker has set the numbers of its rows.
            like: `(k M, D)`, a tensor of the same type and device.
            numbers: n.
        """
        values = like.new_full((numbers, len(like)), torch.nan)
        try:
            values = values if self.failures else compute()
        except RuntimeError as error:
            clear_frames(error.__traceback__)  # frees its tiles for the rest of the loss
            self.failures.append(error)
        own = values.view(numbers, -1, self.total)[..., self.start : self.end].permute(2, 0, 1)
        all_values = self.comm.all_gather(own.contiguous(), self.start, self.total).permute(1, 2, 0)
        return all_values.reshape(numbers, -1)

    def only_own(self, gradient: Tensor) -> Tensor:
        """The gradient `(k M, D)` with zeros in the rows of other workers; changed in place."""
        blocks = gradient.view(-1, self.total, gradient.shape[-1])
        blocks[:, : self.start] = 0  # a layer before the loss must see own rows alone: its gradients are summed
        blocks[:, self.end :] = 0
        return gradient


Config = TypeVar("Config", bound=ObjectiveConfig)


def unit_rows(embeddings: Tensor) -> Tensor:
    """Rows of length 1 in at least float32."""
    # rounding a cosine by eps moves its logit by eps / t
    return F.normalize(embeddings if embeddings.dtype == torch.float64 else embeddings.float(), dim=-1)


def tile_pairs(length: int, size: int, row_shard: RowShard | None) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of tiles on and above the diagonal of a symmetric table; of a shard: its rows, all columns."""
    parts = tiles_of(0, length, size)
    for number, first in enumerate(parts if row_shard is None else row_shard.tiles(length, size)):
        for second in parts[number:] if row_shard is None else parts:
            yield first, second


@dataclass(frozen=True)
class Gathered:
    """The views of the global batch.

    Attributes:
        views: `(M, V, D)` embeddings, in the order of the plan, with gradient.
        facts: `(M,)` int64 each, such as labels and document keys.
        seed: seed of the run.
        step: 1-based optimizer step.
        row_shard: the rows whose gradient `loss` must compute; None: all. Only objectives that share have one.
        size: numbers of the exported embedding that count; None: all.
    """

    views: Tensor
    facts: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    step: int = 1
    row_shard: RowShard | None = None
    size: int | None = None

    def cut(self, embeddings: Tensor) -> Tensor:
        """Embeddings `(..., D)` with zeros behind the first `size` numbers, for cosines and layers of D inputs."""
        if self.size is None:
            return embeddings
        return F.pad(embeddings[..., : self.size], (0, embeddings.shape[-1] - self.size))  # zeros: layers have D inputs

    def detach(self) -> "Gathered":
        """The same batch without gradient."""
        return Gathered(self.views.detach(), self.facts, self.seed, self.step)


@dataclass(frozen=True)
class HeldOutSplit:
    """Held-out rows of a task, and what an objective needs to score an encoder on them.

    Attributes:
        shards: the rows.
        vocabulary: ids of the shards' tokenizer.
        max_content: largest number of tokens of a span, without specials, for which the encoder has positions.
        max_documents: largest number of rows to score, chosen by the run's seed.
        comm: the workers, which share the rows.
        device: device of the encoder.
        frontend: hidden states of images or sounds; None: the rows are texts.
    """

    shards: ShardSet
    vocabulary: Vocabulary
    max_content: int
    max_documents: int
    comm: Communicator
    device: torch.device
    frontend: Frontend | None = None


class Validator(Protocol):
    """Scores an encoder on held-out rows; every worker takes part."""

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        """Scores by name, the same on every worker; None if embeddings are not finite.

        Only a `RowScore`, which has the values of its rows, can be compared with the start of the run.
        """


class Objective(nn.Module, ABC, Generic[Config]):
    """A loss over the views of the global batch.

    Its parameters and buffers are replicated, drawn from the run's seed, trained by the run's optimizer, and saved in
    `objective.safetensors`.

    Args:
        config: settings of the objective.
        run: the part of the run that the objective may depend on.
        embedding_size: D.
    """

    num_views = 2
    """Number of views of a row, V."""
    remembers = False
    """True if `remember` must be called after each update, which keeps the gathered views until then."""
    shards_rows = False
    """True if `loss` computes the gradient of the rows of `batch.row_shard` alone, when there is one. Its value is
    still that of the global batch, and the gradients of the objective's parameters are summed over workers. It is not
    inherited by a class with a `loss` of its own."""
    cuts_exported = False
    """True if `loss` cuts the output of the layers that `exported` returns, with `batch.cut`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "loss" in vars(cls) and "shards_rows" not in vars(cls):
            cls.shards_rows = False

    def __init__(self, config: Config, run: RunContext, embedding_size: int) -> None:
        super().__init__()
        self.config = config
        self.run = run
        self.embedding_size = embedding_size

    @abstractmethod
    def collator(self, vocabulary: Vocabulary, max_content: int) -> Collator:
        """Builds the collator that packs rows of the shards into spans.

        Args:
            vocabulary: ids of the shards' tokenizer.
            max_content: largest number of tokens of a span, without specials, for which the encoder has positions.
        """

    def views(self, embeddings: Tensor, batch: RankBatch) -> Tensor:
        """Views of a worker's rows, `(m, V, D)`, from its spans' embeddings `(S, D)`; no parameters may be used here.

        By default, `batch.views` names the span of each view; without it, a row's V spans are consecutive.

        Raises:
            ValueError: the number of spans does not match the rows and their views.
        """
        if batch.views is not None:
            return embeddings[batch.views]
        if len(embeddings) != batch.num_rows * self.num_views:
            raise ValueError(
                f"{len(embeddings)} spans do not match {batch.num_rows} rows with {self.num_views} views each"
            )
        return embeddings.reshape(batch.num_rows, self.num_views, embeddings.shape[-1])

    @abstractmethod
    def loss(self, batch: Gathered) -> dict[str, Tensor]:
        """Scalar terms by name, a subset of `config.metrics`; their sum is the loss.

        Called once a step with identical arguments on every worker. Draw random numbers only from `batch.seed` and
        keys in `batch.facts`, through `declutr.common.seeding`.
        """

    def terms(self, batch: Gathered) -> dict[str, Tensor]:
        """The terms of `loss`, each the weighted sum over the sizes of `matryoshka` if there are any.

        The exported embedding is cut: layers that are not exported see what a user of the size will have.
        """
        if self.config.matryoshka is None:
            return self.loss(batch)
        width, total = self.exported_size, dict[str, Tensor]()
        for size, weight in self.config.matryoshka.cuts(width):
            if not weight:  # the size is only scored
                continue
            cut_batch = replace(batch, size=size) if size < width else batch
            if not self.exported():  # layers that are not exported see what a user of the size will have
                cut_batch = replace(cut_batch, views=cut_batch.cut(batch.views))
            for name, value in self.loss(cut_batch).items():
                total[name] = total[name] + weight * value if name in total else weight * value
        return total

    def remember(self, batch: Gathered) -> None:
        """Keeps a part of a step's views, without gradient; called after the update."""

    def exported(self) -> list[Dense]:
        """Layers behind the pooling that belong to the exported encoder, in their order."""
        return []

    @property
    def exported_size(self) -> int:
        """Size of the exported embedding if the encoder has no projection, which a run with sizes may not have."""
        layers = self.exported()
        return layers[-1].linear.out_features if layers else self.embedding_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of `matryoshka` below that of the whole embedding, ascending."""
        cuts = [] if self.config.matryoshka is None else self.config.matryoshka.cuts(self.exported_size)
        return tuple(sorted(size for size, _ in cuts if size < self.exported_size))

    def validator(self, held_out: HeldOutSplit) -> Validator | None:
        """Builds the validator that computes `config.scores` on held-out rows; None if there are no scores."""
        del held_out
        return None

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold."""
        return self.state_dict()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Loads the tensors that `state` returned.

        Raises:
            RuntimeError: names or shapes differ.
        """
        self.load_state_dict(state)


def implementation_of(config: ObjectiveConfig) -> type[Objective[Any]]:
    """The class that computes an objective; importing it imports torch.

    Raises:
        UsageError: there is no such class.
    """
    module, _, name = config.implementation.partition(":")
    try:
        implementation = getattr(import_module(module), name)
        if not (isinstance(implementation, type) and issubclass(implementation, Objective)):
            raise TypeError("it is not a subclass of Objective")
        if missing := sorted(getattr(implementation, "__abstractmethods__", ())):
            raise TypeError(f"it does not define {', '.join(missing)}")
    except (Exception, SystemExit) as error:  # an import may raise anything, or end a command with status 0
        raise UsageError(
            f"objective.kind = {config.kind}: implementation = {config.implementation!r}: {type(error).__name__}: "
            f"{error}; correct or reinstall the package of this objective"
        ) from error
    return implementation
