"""A loss from which nothing is left to learn, found when it stays near 0."""

from dataclasses import dataclass

from declutr.trainer.objectives.config import ObjectiveConfig, RunContext

_STEPS = 10


@dataclass
class VanishedLoss:
    """Counts the steps in a row whose loss the objective remarks on.

    Attributes:
        objective: settings of the objective.
        run: settings of the run that it sees.
        steps: number of such steps in a row.
        warned: whether the remark was returned.
    """

    objective: ObjectiveConfig
    run: RunContext
    steps: int = 0
    warned: bool = False

    def add(self, terms: dict[str, float]) -> str | None:
        """Returns the objective's remark once, after ten such steps in a row."""
        remark = self.objective.remark_on_loss(self.run, terms)
        self.steps = self.steps + 1 if remark else 0
        if self.warned or self.steps < _STEPS:
            return None
        self.warned = True
        return remark
