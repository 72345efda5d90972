"""The updates of a step: each auxiliary task with its own update, then the main task."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from declutr.trainer.data.batches import RankBatch
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.step_metrics import PendingStep, StepMetrics
from declutr.trainer.worker.nonfinite_losses import NonFiniteLosses


@dataclass(frozen=True)
class ScheduledStep:
    """A train step, and its losses that were not finite."""

    train_step: TrainStep
    nonfinite_losses: NonFiniteLosses


@dataclass(frozen=True)
class TaskScheduler:
    """Takes the train steps of each step.

    Attributes:
        steps: one for each update, in their order; the last has the main task.
    """

    steps: Sequence[ScheduledStep]

    @property
    def main(self) -> ScheduledStep:
        """The update of the main task."""
        return self.steps[-1]

    @property
    def train_steps(self) -> list[TrainStep]:
        """The train steps in the order of their updates."""
        return [one.train_step for one in self.steps]

    @property
    def late(self) -> bool:
        """True if metrics may be read while the next step is computed."""
        return all(one.train_step.late for one in self.steps)

    def take(self, batch: RankBatch, step: int) -> StepMetrics:
        """Takes all updates of a step; a bad loss leaves out its own update alone.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier updates of the step are done.
        """
        return self.begin(batch, step).read()

    def begin(self, batch: RankBatch, step: int) -> "StepResult":
        """As `take`, but leaves the metrics to be read later, if they may be.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier updates of the step are done.
        """
        result = StepResult(self.steps, step)
        for one in self.steps:
            name = one.train_step.name
            result.pending.append(one.train_step.begin(batch.auxiliary[name] if name else batch, step))
            if not self.late:
                result.read_next()
        return result


@dataclass
class StepResult:
    """A step whose metrics were not read yet, or not all.

    Attributes:
        steps: updates of the step.
        step: 1-based number of the step.
        pending: steps of the updates taken so far.
        measured: metrics of the updates read so far.
    """

    steps: Sequence[ScheduledStep]
    step: int
    pending: list[PendingStep] = field(default_factory=list)
    measured: list[StepMetrics] = field(default_factory=list)

    def read_next(self) -> None:
        """Reads the metrics of the next update.

        Raises:
            NonFiniteLossError: its loss is not finite and may not be skipped.
        """
        place = len(self.measured)
        one = self.steps[place]
        self.measured.append(one.nonfinite_losses.read(one.train_step, self.pending[place], self.step))

    def read(self) -> StepMetrics:
        """The metrics of all updates.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped.
        """
        while len(self.measured) < len(self.steps):
            self.read_next()
        *others, main = self.measured
        return _together(main, dict(zip([one.train_step.name for one in self.steps], others, strict=False)))


def _together(main: StepMetrics, others: dict[str, StepMetrics]) -> StepMetrics:
    """Metrics of all updates: sums of loss and counts; norm, rate and digest by task."""
    if not others:
        return main
    parts = [*others.values(), main]
    tokens = sum(part.num_tokens for part in parts)
    places = sum(part.num_tokens / max(1e-9, 1 - part.padding_share) for part in parts)
    auxiliary = {
        f"{name}_{key}": getattr(part, key)
        for name, part in others.items()
        for key in ("grad_norm", "lr", "batch_digest", "skipped")
    }
    return replace(
        main,
        loss=sum(part.loss for part in parts),
        terms={**main.terms, **{name: value for part in others.values() for name, value in part.terms.items()}},
        num_selected=sum(part.num_selected for part in parts),
        num_tokens=tokens,
        padding_share=1 - tokens / max(1.0, places),
        flops=sum(part.flops for part in parts),
        auxiliary=auxiliary,
    )
