"""Steps whose loss is not finite."""

from dataclasses import dataclass

from declutr.common.console.logs import get_logger


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient is not finite; the parameters were not changed."""


@dataclass
class NonFiniteLosses:
    """Counts the updates that were left out because their loss was not finite, if `on_nonfinite_loss` allows it.

    Attributes:
        skip: skip such steps (`on_nonfinite_loss: skip`) instead of stopping.
        most_in_a_row: `max_skipped_steps`.
        skipped: steps so far whose update was skipped.
        in_a_row: skipped steps since the last good one.
    """

    skip: bool = False
    most_in_a_row: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def add(self, step: int, name: str, problem: str | None) -> None:
        """Counts a step that was taken; a skipped one used up its documents and changed nothing else.

        Args:
            step: 1-based number of the step.
            name: name of the update's task.
            problem: what is not finite; None: nothing.

        Raises:
            NonFiniteLossError: the loss is not finite and may not be skipped, or there were too many in a row; on every
                rank.
        """
        if problem is None:
            self.in_a_row = 0
            return
        if not self.skip:
            raise NonFiniteLossError(problem)
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row > self.most_in_a_row:
            raise NonFiniteLossError(
                f"{problem}. {self.in_a_row} such steps in a row exceed max_skipped_steps = {self.most_in_a_row}"
            )
        prefix = f"task {name}: " if name else ""
        get_logger().warning("step %d: %sloss or gradient not finite, skipped (%d so far)", step, prefix, self.skipped)
