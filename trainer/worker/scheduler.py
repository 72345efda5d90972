"""The updates of a step: each auxiliary task with its own update, then the main task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from declutr.trainer.data.batches import RankBatch
from declutr.trainer.parallel.request import Agreement
from declutr.trainer.step.step import PendingStep, StepMetrics, TrainStep


@dataclass(frozen=True)
class TaskScheduler:
    """Takes the train steps of each step.

    Attributes:
        train_steps: one for each update, in their order; the last has the main task.
    """

    train_steps: Sequence[TrainStep]

    @property
    def main(self) -> TrainStep:
        """The update of the main task."""
        return self.train_steps[-1]

    @property
    def late(self) -> bool:
        """True if metrics may be read while the next step is computed."""
        return all(train_step.late for train_step in self.train_steps)

    def take(self, batch: Mapping[str, RankBatch], step: int) -> StepMetrics:
        """Takes all updates of a step; a bad loss leaves out its own update alone.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier updates of the step are done.
        """
        return read(self.begin(batch, step))

    def begin(self, batch: Mapping[str, RankBatch], step: int, agreement: Agreement | None = None) -> list[PendingStep]:
        """As `take`, but leaves the metrics to be read later, if they may be, and agrees on the workers' requests.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier updates of the step are done.
        """
        pending = []
        for train_step in self.train_steps:
            pending.append(train_step.begin(batch, step, agreement if train_step is self.main else None))
            if not self.late:
                pending[-1].read()
        return pending


def read(pending: Sequence[PendingStep]) -> StepMetrics:
    """Metrics of all updates of a step: sums of loss and counts; norm, rate and digest by task.

    Raises:
        NonFiniteLossError: a loss is not finite and may not be skipped.
    """
    parts = [step.read() for step in pending]
    *other_parts, main = parts
    if not other_parts:
        return main
    tokens = sum(part.num_tokens for part in parts)
    places = sum(part.num_tokens / max(1e-9, 1 - part.padding_share) for part in parts)
    auxiliary = {
        f"{step.train_step.name}_{key}": getattr(part, key)
        for step, part in zip(pending, other_parts, strict=False)
        for key in ("grad_norm", "lr", "batch_digest", "skipped")
    }
    return replace(
        main,
        loss=sum(part.loss for part in parts),
        terms={name: value for part in (main, *other_parts) for name, value in part.terms.items()},
        num_selected=sum(part.num_selected for part in parts),
        num_tokens=tokens,
        padding_share=1 - tokens / max(1.0, places),
        flops=sum(part.flops for part in parts),
        auxiliary={name: value for part in parts for name, value in part.auxiliary.items()} | auxiliary,
    )
