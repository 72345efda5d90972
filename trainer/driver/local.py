"""A run in the process of the command, without Ray (`scaling.num_workers: 0`)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from declutr.common.errors import RunStoppedError, TrainingFailedError
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.driver.continuation import Device
from declutr.trainer.driver.supervisor import Signals
from declutr.trainer.run import RunPlan
from declutr.trainer.worker.device import torch_as_before
from declutr.trainer.worker.entry import work
from declutr.trainer.worker.heartbeat import Heartbeat


class LocalRun:
    """Takes the steps of a run here, where a supervisor would start a worker group.

    Args:
        plan: of the run.
        signals: signals to this process.
        began: begin of the command (Unix time).
        choose_device: returns the run's device, given the number of GPUs.
    """

    def __init__(
        self, plan: RunPlan, signals: Signals, began: float, choose_device: Callable[[Mapping[str, float]], Device]
    ) -> None:
        self._plan, self._signals, self._began, self._choose_device = plan, signals, began, choose_device
        self._heartbeat = Heartbeat(0, 1)

    @property
    def line(self) -> dict[str, Any] | None:
        """The newest step's line of metrics; None before the first."""
        return self._heartbeat.line

    def run_to_end(self) -> int:
        """Trains to the last step, or until the scores no longer improve; returns the last step taken.

        Raises:
            TrainingFailedError: the run cannot continue.
            RunStoppedError: this process received a signal, or lost the run to another command.
        """
        device = torch.device(self._choose_device({"GPU": torch.cuda.device_count()}))
        with torch_as_before():
            config, identity = self._plan.config, self._plan.identity
            outcome = work(config, identity, device, self._heartbeat, self._began, lambda: self._signals.received)
        if outcome is None:
            return self._plan.total_steps
        if outcome.get("given_up"):
            raise TrainingFailedError(
                f"{outcome['given_up']}. Earlier checkpoints are in {self._plan.config.run}/{CHECKPOINTS}"
            )
        if outcome.get("early"):
            return int(outcome["step"])
        raise RunStoppedError(
            f"{self._plan.config.run}: stopped at step {outcome['step']} of {self._plan.total_steps} after "
            f"{self._signals.received}; the same command continues",
            self._signals.status,
        )
