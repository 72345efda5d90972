"""One task's loss and counts in a step, over all ranks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.packedbatch import DIGEST, to_device
from declutr.trainer.model.flops import step_flops
from declutr.trainer.step.gradcache import Gradients
from declutr.trainer.step.task import TrainTask


class TaskTotals(NamedTuple):
    """Loss and counts of a task, read."""

    loss: float
    terms: dict[str, float]
    tokens: float
    places: float
    flops: float
    digest: int


@dataclass(frozen=True)
class DeviceTotals:
    """Loss and counts of a task on the device.

    Attributes:
        task: the task.
        names: names of the objective's terms.
        num_selected: selected tokens of all ranks.
        numbers: `(n,)` float64: MLM sum, tokens, token places, FLOPs and digest of all ranks, and the terms.
    """

    task: TrainTask
    names: tuple[str, ...]
    num_selected: int
    numbers: Tensor

    @staticmethod
    def of(task: TrainTask, batch: RankBatch, found: Gradients) -> "DeviceTotals":
        """Adds the ranks' counts."""
        spans, encoder = batch.spans, task.encoder
        places = sum(encoder.token_places(piece) for piece in task.cut(batch))
        flops = step_flops(encoder.model, encoder.num_linear_weights, spans.lengths, len(spans.labels))
        counts = torch.tensor([spans.num_tokens, places, flops, batch.digest], dtype=torch.float64)
        device = found.mlm_sum.device
        totals = task.comm.all_reduce_sum(torch.cat([found.mlm_sum.double()[None], to_device(counts, device)]))
        terms = [value.detach().double().view(1) for value in found.terms.values()]
        return DeviceTotals(task, tuple(found.terms), found.num_selected, torch.cat([totals, *terms]))

    @property
    def label(self) -> str:
        """Prefix of the task's metrics."""
        return self.task.label

    def totals(self, numbers: list[float]) -> TaskTotals:
        """Loss and counts of `numbers` that were read."""
        mlm_sum, tokens, places, flops, digest, *terms = numbers
        config, weight = self.task.objective.config, self.task.weight
        values = dict(zip(self.names, terms, strict=True)) | {"mlm": mlm_sum / max(1, self.num_selected)}
        found = {name: values.get(name, 0.0) for name in config.metrics}
        loss = sum({"mlm": config.mlm_weight}.get(name, 1.0) * value for name, value in found.items())
        return TaskTotals(
            loss if weight == 1 else weight * loss,
            {f"{self.label}{name}": value for name, value in found.items()},
            tokens,
            places,
            flops,
            int(digest) % DIGEST,
        )
