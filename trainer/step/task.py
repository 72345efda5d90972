"""A training task of a run: an objective on the encoder, with everything that computes its gradient and its totals.

With `scaling.elastic_determinism`, sums must not depend on the number of workers. Then each canonical microbatch has a
separate forward and backward, and its gradient is a separate term of the sums (trainer/parallel/reducers.py). The loss
is computed from the embeddings of all, whole and the same on every worker.

FLOPs: the forward of a token costs 2 for every weight of the encoder's linear layers, plus 4 * layers * H * span length
for attention (scores and weighted sum, without reduction for a sliding window). The MLM head costs
2 * (H^2 + H * vocabulary) for each selected token. A backward costs twice its forward. Not counted as work of the model
are embedding look-ups, norms, activations, the loss, and the second forward of gradient caching or activation
checkpointing.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from declutr.trainer.data.batches import AnyBatch, RankBatch, canonical_microbatches
from declutr.trainer.data.packedbatch import to_device
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.base import SHARED_ROWS, Objective, RowShard
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.parallel.request import Agreement, Request
from declutr.trainer.step.gradcache import GlobalCounts, GradCache, Gradients, Microbatch, out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FORWARD_AND_BACKWARD = 3
# Peaks of dense matrix products in FLOP/s, half precision and float32, without sparsity, from vendors' data sheets. A
# GPU has the peak with the most words of its name: "NVIDIA H100 PCIe" is slower than "NVIDIA H100 80GB HBM3".
_PEAKS = {
    "GB200": (2500e12, 90e12),
    "B200": (2250e12, 80e12),
    "H200": (989e12, 67e12),
    "GH200": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "A10": (125e12, 31.2e12),
    "A10G": (70e12, 35e12),
    "L4": (121e12, 30.3e12),
}
_MLM_STEP = 2.0**-20  # losses are rounded to its multiples: below 2^33, sums of those are exact in float64
NUM_COUNTS = 5  # first numbers of `TrainTask.totals`, before the terms of the loss
T = TypeVar("T")


def step_flops(model: "PreTrainedModel", lengths: Tensor, num_selected: int) -> float:
    """FLOPs of forward and backward over spans, by the formula above.

    Args:
        model: the masked language model; only its shape is used.
        lengths: `(S,)` number of tokens of each span, on the CPU.
        num_selected: number of tokens that the MLM head predicts.
    """
    config = model.config
    hidden = int(config.hidden_size)
    layers = (module for module in model.base_model.modules() if isinstance(module, nn.Linear))
    weights = sum(layer.weight.numel() for layer in layers)
    sizes = lengths.numpy().astype(np.float64)
    tokens, pairs = float(sizes.sum()), float(np.square(sizes).sum())
    body = 2 * weights * tokens + 4 * int(config.num_hidden_layers) * hidden * pairs
    head = 2 * (hidden * hidden + hidden * int(config.vocab_size)) * num_selected
    return _FORWARD_AND_BACKWARD * (body + head)


def peak_flops(gpu: str | None, half: bool) -> float | None:
    """Peak of a GPU in FLOP/s by its name; None for other GPUs and for CPUs, which have no name."""
    words = set(re.split(r"[\s-]+", gpu or ""))
    names = sorted((name for name in _PEAKS if words.issuperset(name.split())), key=lambda name: name.count(" "))
    return _PEAKS[names[-1]][0 if half else 1] if names else None


def gpu_name(device: torch.device) -> str | None:
    """Name of the GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class CanonicalCache(GradCache):
    """Both passes of a step, by canonical microbatches.

    Attributes:
        first_canonical: number of this rank's first microbatch in the global batch.
    """

    first_canonical: int

    def embed(self, pieces: list[AnyBatch]) -> list[tuple[Tensor, Tensor]]:
        """Span embeddings and MLM loss of each piece, with their graphs if `microbatch.max_tokens` allows them all.

        Otherwise the second pass computes each again, as it does with activation checkpointing.
        """
        limit, tokens = self.task.microbatch.max_tokens, sum(piece.num_tokens for piece in pieces)
        kept = limit is None or tokens <= limit
        if self.task.encoder.config.activation_checkpointing:
            kept = len(pieces) == 1  # a recomputation uses the dropout keys of the latest forward
        if not kept and not self.objective.config.embeds:
            return []
        with torch.set_grad_enabled(kept):
            return [self._forward(piece, number) for number, piece in enumerate(pieces)]

    def _differentiate(
        self, batch: RankBatch, pieces: list[AnyBatch], embedded: list[tuple[Tensor, Tensor]], counts: GlobalCounts
    ) -> Gradients:
        reducer = self.task.reducer
        assert reducer is not None
        share = self.task.weight * self.objective.config.mlm_weight / max(1, counts.selected)
        cached = [(spans.detach(), mlm_sum.detach()) for spans, mlm_sum in embedded]
        kept = embedded if any(tensor.requires_grad for pair in embedded for tensor in pair) else []
        # the loss is the same on every rank, so one of them adds the gradient of the objective's parameters
        with reducer.ignoring() if self.comm.rank else nullcontext():
            terms, gradient, gathered, spread = self._through_loss(cached, batch, counts)
        mlm_sum = self._second_pass(pieces, gradient, share, kept)
        return Gradients(terms, mlm_sum, counts.selected, gathered, spread)

    def _addend(self, mlm_sum: Tensor) -> Tensor:
        """In float64 and rounded, so that the order of the pieces has no effect on the sum."""
        return (mlm_sum.double() / _MLM_STEP).round() * _MLM_STEP

    def _views(self, spans: Tensor, batch: RankBatch) -> Tensor:
        """Views of the rank's rows, computed for each microbatch alone."""
        microbatches = canonical_microbatches(batch)
        parts = spans.split([microbatch.spans.num_spans for microbatch in microbatches])
        views = torch.cat(
            [self.objective.views(part, microbatch) for part, microbatch in zip(parts, microbatches, strict=True)]
        )
        return views + 0.0  # a gather by sums turns -0 into 0, and one worker gathers nothing

    def _row_shard(self, batch: RankBatch, counts: GlobalCounts) -> RowShard | None:
        """None: sums within shares would depend on the number of workers."""
        del batch, counts
        return None

    def _stream(self, number: int) -> tuple[int, int]:
        """As for one worker that has all microbatches."""
        return 0, self.first_canonical + number


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Computes this rank's part of the gradient of one objective.

    Attributes:
        encoder: the model, in training mode.
        objective: the loss on the views of the global batch.
        comm: the workers.
        seed: the task's seed, for dropout.
        microbatch: limit of the tokens in one forward.
        autocast: type of the forward's matrix products (bfloat16), or None for the parameters' type.
        name: name among the run's auxiliary tasks; empty for the main one.
        frontend: hidden states of patches; None for spans of tokens.
        weight: factor of the loss.
        shared_rows: views of the global batch above which each worker computes a share of the loss.
        overlap: sums of the encoder's gradients that start during the task's last backward, which is the last of the
            update; None: they are summed after it.
        reducer: sums of gradients that do not depend on the number of workers; None: ordinary ones.
    """

    encoder: Encoder
    objective: Objective[Any]
    comm: Communicator
    seed: int
    microbatch: Microbatch = field(default_factory=Microbatch)
    autocast: torch.dtype | None = None
    name: str = ""
    frontend: Frontend | None = None
    weight: float = 1.0
    shared_rows: int = SHARED_ROWS
    overlap: BucketedReducer | None = None
    reducer: FixedPointReducer | None = None

    @property
    def label(self) -> str:
        """Prefix of the task's metrics: `NAME_`, empty for the main task."""
        return f"{self.name}_" if self.name else ""

    def buffers(self) -> list[Tensor]:
        """Copies of the objective's buffers, for example the statistics of a BatchNorm."""
        return [buffer.clone() for buffer in self.objective.buffers()]

    def restore(self, buffers: list[Tensor]) -> None:
        """Restores the objective's buffers to their values before a step that failed."""
        with torch.no_grad():
            for buffer, before in zip(self.objective.buffers(), buffers, strict=True):
                buffer.copy_(before)

    def attempt(self, batch: RankBatch, step: int, agreement: Agreement | None = None) -> Gradients | None:
        """Accumulates this rank's part of the global gradient; None on every rank if one rank ran out of memory.

        The result does not depend on how the spans are cut (trainer/step/gradcache.py), so a step that ran out of
        memory is repeated with smaller pieces.

        Ranks agree before and after the all-gather of embeddings, so that none waits there for a rank that failed. The
        first of these two exchanges counts the batch too; the second one carries the requests of `agreement`.
        """
        passes = self._passes(batch, step)
        pieces = self._pieces(batch)
        embedded = self._tried(lambda: passes.embed(pieces))
        counts = passes.count(batch, failed=embedded is None)
        if embedded is None or counts is None:
            return None
        result = self._tried(lambda: passes.differentiate(batch, pieces, embedded, counts))
        if self.microbatch.automatic and self.overlap is not None:
            self.overlap.flush()  # a rank that failed sends the rest too, so that all enter the same exchanges
        return result if self._all_fit(result is not None, agreement) else None

    def totals(self, batch: RankBatch, gradients: Gradients) -> Tensor:
        """`(5 + n,)` float64: MLM sum, tokens, token places, FLOPs and digest of all ranks, and n terms of the loss."""
        spans, encoder, mlm_sum = batch.spans, self.encoder, gradients.mlm_sum.double()[None]
        places = sum(encoder.token_places(piece) for piece in self.cut(batch))
        flops = step_flops(encoder.model, spans.lengths, len(spans.labels))
        counts = torch.tensor([spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        totals = self.comm.all_reduce_sum(torch.cat([mlm_sum, to_device(counts, mlm_sum.device)]))
        return torch.cat([totals, *(value.detach().double().view(1) for value in gradients.terms.values())])

    def losses(self, gradients: Gradients, totals: list[float]) -> tuple[float, dict[str, float]]:
        """The weighted loss, and its terms by their names in the metrics, of `totals` that were read."""
        config, (mlm_sum, *numbers) = self.objective.config, totals
        values = dict(zip(gradients.terms, numbers[NUM_COUNTS - 1 :], strict=True))
        values["mlm"] = mlm_sum / max(1, gradients.num_selected)
        values = {name: values.get(name, 0.0) for name in config.metrics}
        loss = sum({"mlm": config.mlm_weight}.get(name, 1.0) * value for name, value in values.items())
        return self.weight * loss, {f"{self.label}{name}": value for name, value in values.items()}

    def cut(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share: canonical ones if the bits must not depend on the number of workers."""
        if self.reducer is not None:
            return [microbatch.spans for microbatch in canonical_microbatches(batch)]
        return self.microbatch.cut(batch.spans)

    def _passes(self, batch: RankBatch, step: int) -> GradCache:
        """Both passes of a step."""
        if self.reducer is None:
            return GradCache(self, step)
        return CanonicalCache(self, step, batch.canonical[0].number if batch.canonical else 0)

    def _pieces(self, batch: RankBatch) -> list[AnyBatch]:
        """The microbatches of a share. With a sharded encoder, all ranks get the same number; the last may be empty."""
        pieces, spans = self.cut(batch), batch.spans
        if not self.encoder.sharded:
            return pieces
        # every layer's forward is an exchange of all ranks
        return pieces + [spans.span_slice(0, 0)] * (self.comm.all_reduce_max(len(pieces)) - len(pieces))

    def _tried(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it ran out of memory and the microbatch is automatic."""
        try:
            return work()
        except RuntimeError as error:
            if not self.microbatch.automatic or not out_of_memory(error):
                raise
        return None

    def _all_fit(self, fitted: bool, agreement: Agreement | None) -> bool:
        """True if no rank ran out of memory; then the requests are agreed too."""
        agreement = None if self.comm.size == 1 else agreement
        if agreement is None and not self.microbatch.automatic:
            return True
        requests = Request(0) if agreement is None else agreement.requests()
        agreed = self.comm.all_reduce_or(requests if fitted else requests | Request.MEMORY)
        if agreement is not None:
            agreement.agreed = agreed
        return Request.MEMORY not in agreed
