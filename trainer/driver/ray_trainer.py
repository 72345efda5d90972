"""Ray's trainer without the processes that a run does not need: each costs a second of a core during every start.

Ray's controller loads this file too, so it imports neither torch nor the driver.
"""

from typing import Any

import ray
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


class RayTrainer(DataParallelTrainer):  # type: ignore[misc]
    """DataParallelTrainer with fewer processes. If a version of Ray does not call the methods below, they exist.

    - *Datasets*: no process hands them out, because each rank reads its own.
    - *Placement group of a killed controller*: Ray frees it at the end of the job, which the supervisor ends after such
      a failure (`ray.shutdown`). A trial of Ray Tune cannot end its job, so Ray's process stays there.
    - *Autoscaling requests*: not sent by a group of fixed size in a session on this machine.
    """

    def __init__(self, *, local: bool, **given: Any) -> None:
        super().__init__(**given)
        self._local = local

    def _create_default_callbacks(self) -> list[Any]:
        needless = {"DatasetsCallback"}
        if ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE:
            needless.add("PlacementGroupCleanerCallback")
        return [one for one in super()._create_default_callbacks() if type(one).__name__ not in needless]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        if self._local and type(given["scaling_policy"]) is FixedScalingPolicy:
            given["scaling_policy"] = _WithoutAutoscaling(given["scaling_policy"].scaling_config)
        return super()._initialize_and_run_controller(**given)


class _WithoutAutoscaling(FixedScalingPolicy):  # type: ignore[misc]
    def after_controller_start(self, train_run_context: Any) -> None:
        """Sends no request."""

    def _maybe_send_resource_request(self) -> None:
        """Sends no request."""
