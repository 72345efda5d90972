"""Steps whose loss is not finite."""

from dataclasses import dataclass

from declutr.common.console.logs import get_logger
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.step_metrics import NonFiniteLossError, PendingStep, StepMetrics


@dataclass
class NonFiniteLosses:
    """Reads the metrics of steps, and skips those whose loss is not finite if `on_nonfinite_loss` allows it.

    Attributes:
        skip: skip such steps (`on_nonfinite_loss: skip`) instead of stopping.
        most_in_a_row: `max_skipped_steps`.
        skipped: steps so far whose update was skipped.
        in_a_row: skipped steps since the last good one.
    """

    skip: bool
    most_in_a_row: int
    skipped: int = 0
    in_a_row: int = 0

    def read(self, train_step: TrainStep, pending: PendingStep, step: int) -> StepMetrics:
        """The metrics of a step that was taken; a skipped one used up its documents and changed nothing else.

        Raises:
            NonFiniteLossError: the loss is not finite and may not be skipped, or there were too many in a row; on every
                rank.
        """
        try:
            measured = pending.read()
        except NonFiniteLossError as error:
            if not self.skip or error.measured is None:
                raise
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row > self.most_in_a_row:
                raise NonFiniteLossError(
                    f"{error}. {self.in_a_row} such steps in a row exceed max_skipped_steps = {self.most_in_a_row}"
                ) from error
            named = f"task {train_step.name}: " if train_step.name else ""
            message = "step %d: %sloss or gradient not finite, skipped (%d so far)"
            get_logger().warning(message, step, named, self.skipped)
            return error.measured
        self.in_a_row = 0
        return measured
