"""A training task of a run: an objective on the encoder, with everything that computes its gradient and its totals.

FLOPs: the forward of a token costs 2 for every weight of the encoder's linear layers, plus 4 * layers * H * span length
for attention (scores and weighted sum, without reduction for a sliding window). The MLM head costs
2 * (H^2 + H * vocabulary) for each selected token. A backward costs twice its forward. Not counted as work of the model
are embedding look-ups, norms, activations, the loss, and the second forward of gradient caching or activation
checkpointing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from declutr.trainer.data.batches import AnyBatch, RankBatch, canonical_microbatches
from declutr.trainer.data.packedbatch import to_device
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.base import SHARED_ROWS, Objective
from declutr.trainer.parallel.communicator import Agreement, Communicator, Request
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.step.gradcache import GradCache, Gradients, Microbatch, out_of_memory

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
NUM_COUNTS = 5  # first numbers of `TrainTask.totals`, before the terms of the loss
T = TypeVar("T")


def step_flops(
    model: "PreTrainedModel",  # the masked language model; only its shape is used
    lengths: Tensor,  # `(S,)` number of tokens of each span, on the CPU
    num_selected: int,  # number of tokens that the MLM head predicts
) -> float:
    """FLOPs of forward and backward over spans, by the formula above."""
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


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Computes this rank's part of the gradient of one objective."""

    encoder: Encoder  # the model, in training mode
    objective: Objective[Any]  # the loss on the views of the global batch
    comm: Communicator  # the workers
    seed: int  # the task's seed, for dropout
    microbatch: Microbatch = field(default_factory=Microbatch)  # limit of the tokens in one forward
    # type of the forward's matrix products (bfloat16), or None for the parameters' type.
    autocast: torch.dtype | None = None
    name: str = ""  # name among the run's auxiliary tasks; empty for the main one
    frontend: Frontend | None = None  # hidden states of patches; None for spans of tokens
    weight: float = 1.0  # factor of the loss
    shared_rows: int = SHARED_ROWS  # views of the global batch above which each worker computes a share of the loss
    # sums of the encoder's gradients that start during the task's last backward, which is the last of the update; None:
    # they are summed after it.
    overlap: BucketedReducer | None = None
    # sums of gradients that do not depend on the number of workers; None: ordinary ones.
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
        passes = GradCache(self, step, batch, self._pieces(batch))
        embedded = self._tried(passes.embed)
        counts = passes.count(failed=embedded is None)
        if embedded is None or counts is None:
            return None
        result = self._tried(lambda: passes.differentiate(embedded, counts))
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
        return list(batch.spans.microbatches(self.microbatch.max_tokens))

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
