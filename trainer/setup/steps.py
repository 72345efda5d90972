"""Number of steps of a run, without torch."""

from declutr.trainer.data.plan import Plan
from declutr.trainer.setup.config import TrainConfig


def total_steps(config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else plan.steps_in(config.epochs or 1.0)
