"""One start of the worker group on Ray: session, TorchTrainer, and what came of it."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

# Ray Train reads these when it starts. It otherwise looks at the workers every 2 s only, also for their end; a group
# that does not get its resources otherwise waits a minute before another size is tried. How fast a dead node is noticed
# is the head's affair: RAY_health_check_period_ms and its like, where `ray start --head` runs (cluster.yaml).
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
# The supervisor itself looks for nodes that are to be taken away; Ray's watcher would be one more process each start.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from common.console.logs import get_logger
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.setup.config import TrainConfig
from trainer.worker.backend import GroupConfig
from trainer.worker.loop import train_loop

_BACKEND_SECONDS = 1800


def build_group(config: TrainConfig, run: Path, channel: str, marks: dict[str, float]) -> TorchTrainer:
    """The trainer of a run whose paths are absolute. One start: who starts again is trainer/driver/supervisor.py.

    Args:
        config: of the run, its paths absolute.
        run: its folder.
        channel: name of the channel the workers write to.
        marks: what the start has taken so far (trainer/worker/heartbeat.py, Stopwatch).
    """
    scaling = config.scaling
    resources = ray.cluster_resources()
    needed = scaling.least_workers * scaling.cpus_per_worker + 1
    if resources.get("CPU", 0) < needed:
        get_logger().warning("the cluster has %g CPUs, this run needs %d: it waits", resources.get("CPU", 0), needed)
    gpus = resources.get("GPU", 0)
    if scaling.device == "cuda" and gpus < scaling.least_workers:
        words = "scaling.device = cuda: the cluster has %g GPUs, this run needs %d: it waits"
        get_logger().warning(words, gpus, scaling.least_workers)
    use_gpu = scaling.device == "cuda" or (scaling.device == "auto" and gpus >= scaling.least_workers)
    # Left by versions that told Ray of checkpoints: it would look for those. Ours are found by looking at the folder.
    (run / CHECKPOINTS / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    per_worker: dict[str, float] = {"CPU": scaling.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    return TorchTrainer(
        train_loop,
        train_loop_config={"config": config.model_dump(mode="json"), "channel": channel, "marks": marks},
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.workers,
            use_gpu=use_gpu,
            resources_per_worker=per_worker,
            elastic_resize_monitor_interval_s=scaling.resize_seconds,
        ),
        torch_config=GroupConfig("nccl" if use_gpu else "gloo", max(_BACKEND_SECONDS, 2 * scaling.hang_seconds)),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS, storage_path=str(run), failure_config=ray.train.FailureConfig(max_failures=0)
        ),
    )


class Fit(threading.Thread):
    """`TorchTrainer.fit` in a thread: the main one is for signals and for watching.

    Attributes:
        value: the answer of the first worker, once it has ended well.
        error: the reason, once it has not.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(daemon=True, name="declutr-fit")
        self._trainer = trainer
        self._done = threading.Event()
        self.value: dict[str, Any] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Runs the group to its end."""
        try:
            self.value = self._trainer.fit().return_value
        except BaseException as error:  # noqa: BLE001 - judged by the supervisor
            self.error = error
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after at most so many seconds."""
        return self._done.wait(seconds)


def kill_worker(heartbeat: dict[str, Any]) -> None:
    """Ends a worker's process on its own host, also one that is stopped. Where it cannot, Ray will notice by itself."""
    there = NodeAffinitySchedulingStrategy(node_id=heartbeat["node"], soft=False)
    try:
        ray.get(_kill.options(num_cpus=0, scheduling_strategy=there).remote(heartbeat["pid"]), timeout=30)
    except RayError as error:  # its node is gone, or does not answer
        get_logger().warning("worker %d (pid %d) cannot be ended: %s", heartbeat["rank"], heartbeat["pid"], error)


@ray.remote  # type: ignore[untyped-decorator]
def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, signal.SIGKILL)
