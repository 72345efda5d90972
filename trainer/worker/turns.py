"""The turns of a step: each additional branch with its own update, then the main branch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainer.data.batches import RankBatch
from trainer.step.measured import PendingStep, StepMetrics
from trainer.step.step import Stepper
from trainer.worker.bad_losses import BadLosses


@dataclass(frozen=True)
class Turn:
    """A stepper, and its steps whose loss was not finite."""

    stepper: Stepper
    bad_losses: BadLosses


@dataclass(frozen=True)
class Turns:
    """Takes the turns of each step.

    Attributes:
        turns: one for each update, in their order; the last has the main branch.
    """

    turns: Sequence[Turn]

    @property
    def main(self) -> Turn:
        """The turn of the main branch."""
        return self.turns[-1]

    @property
    def steppers(self) -> list[Stepper]:
        """The steppers in the order of their turns."""
        return [turn.stepper for turn in self.turns]

    @property
    def late(self) -> bool:
        """True if metrics may be read while the next step is computed."""
        return all(turn.stepper.late for turn in self.turns)

    def take(self, batch: RankBatch, step: int) -> StepMetrics:
        """Takes all turns of a step; a bad loss leaves out the update of its turn alone.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier turns of the step are updated.
        """
        return self.begin(batch, step).read()

    def begin(self, batch: RankBatch, step: int) -> "TakenStep":
        """As `take`, but leaves the metrics to be read later, if they may be.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped; earlier turns of the step are updated.
        """
        taken = TakenStep(self.turns, step)
        for turn in self.turns:
            name = turn.stepper.name
            taken.pending.append(turn.stepper.begin(batch.auxiliary[name] if name else batch, step))
            if not self.late:
                taken.read_next()
        return taken


@dataclass
class TakenStep:
    """A step whose metrics were not read yet, or not all.

    Attributes:
        turns: turns of the step.
        step: 1-based number of the step.
        pending: steps of the turns taken so far.
        measured: metrics of the turns read so far.
    """

    turns: Sequence[Turn]
    step: int
    pending: list[PendingStep] = field(default_factory=list)
    measured: list[StepMetrics] = field(default_factory=list)

    def read_next(self) -> None:
        """Reads the metrics of the next turn.

        Raises:
            NonFiniteLossError: its loss is not finite and may not be skipped.
        """
        place = len(self.measured)
        turn = self.turns[place]
        self.measured.append(turn.bad_losses.read(turn.stepper, self.pending[place], self.step))

    def read(self) -> StepMetrics:
        """The metrics of all turns.

        Raises:
            NonFiniteLossError: a loss is not finite and may not be skipped.
        """
        while len(self.measured) < len(self.turns):
            self.read_next()
        *others, main = self.measured
        return _together(main, dict(zip([turn.stepper.name for turn in self.turns], others, strict=False)))


def _together(main: StepMetrics, others: dict[str, StepMetrics]) -> StepMetrics:
    """Metrics of all turns: sums of loss and counts; norm, rate and digest by branch."""
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
