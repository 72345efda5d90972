"""Steps whose loss is not finite."""

from dataclasses import dataclass

from common.console.logs import get_logger
from trainer.data.batches import RankBatch
from trainer.step.step import NonFiniteLossError, StepMetrics, Stepper


@dataclass
class BadLosses:
    """Takes steps, and skips those whose loss is not finite if `on_bad_loss` allows it.

    Attributes:
        skip: skip such steps (`on_bad_loss: skip`) instead of stopping.
        most_in_a_row: `max_skipped_steps`.
        skipped: steps so far whose update was skipped.
        in_a_row: skipped steps since the last good one.
    """

    skip: bool
    most_in_a_row: int
    skipped: int = 0
    in_a_row: int = 0

    def take(self, stepper: Stepper, batch: RankBatch, step: int) -> StepMetrics:
        """Takes a step; a skipped one uses up its documents and changes nothing else.

        Raises:
            NonFiniteLossError: the loss is not finite and may not be skipped, or there were too many in a row; on every
                rank.
        """
        try:
            measured = stepper.step(batch, step)
        except NonFiniteLossError as error:
            if not self.skip or error.measured is None:
                raise
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row > self.most_in_a_row:
                raise NonFiniteLossError(
                    f"{error}. {self.in_a_row} such steps in a row exceed max_skipped_steps = {self.most_in_a_row}"
                ) from error
            named = f"branch {stepper.name}: " if stepper.name else ""
            message = "step %d: %sloss or gradient not finite, skipped (%d so far)"
            get_logger().warning(message, step, named, self.skipped)
            return error.measured
        self.in_a_row = 0
        return measured
