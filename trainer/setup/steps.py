"""Number of steps of a run, without torch."""

from trainer.data.plan import Plan
from trainer.setup.config import TrainConfig


def total_steps(config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else plan.steps_in(config.epochs or 1.0)
