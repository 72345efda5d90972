"""One start of the worker group on Ray: its TorchTrainer and the thread that runs it."""

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

# Ray Train reads these when it starts. By default a group that does not get its resources waits a minute before another
# size is tried. The head decides how fast a dead node is
# noticed: set RAY_health_check_period_ms and similar where `ray start --head` runs (cluster.yaml).
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
# The supervisor checks for draining nodes itself; Ray's watcher would be one more process at each start.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

import ray
import ray.train
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from declutr.common.console.logs import get_logger
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.scaling import ScalingConfig

_BACKEND_SECONDS = 1800
_POLL_SECONDS = 0.2  # by default Ray Train polls each worker only every 2 s, also for its end
_POLLS = 1000.0  # of all workers, a second: more would keep the process that polls busy
# Every step has tensors of other sizes, which fragment the heap of glibc to a multiple of what is in use
# (docs/evidence/log.md). A host without this file of Ray's wheel, for example a Mac, works without it.
_ALLOCATOR = Path(ray.__file__).parent / "core" / "libjemalloc.so"
# It keeps what is freed for the next step. Else the kernel would clear the same pages again in every step, which takes
# a quarter of the processor's time.
_ALLOCATION = "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"


def build_group(
    scaling: ScalingConfig,  # settings of the workers' number
    run: Path,  # folder of the run
    # for the workers, as `train_loop` (trainer/worker/entry.py) takes them, but `checkpoints`. GPUs that are missing
    # for their `device` are waited for.
    settings: dict[str, Any],
) -> Any:
    """The TorchTrainer of one start of a run; trainer/driver/supervisor.py restarts it."""
    seconds = max(_POLL_SECONDS, scaling.most_workers / _POLLS)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", f"{seconds:g}")
    from ray.train.torch import TorchTrainer  # loads torch, which no refused run waits for

    from declutr.trainer.worker.backend import GroupConfig

    resources = ray.cluster_resources()
    needed = scaling.least_workers * scaling.cpus_per_worker + 1
    if resources.get("CPU", 0) < needed:
        get_logger().warning("the cluster has %g CPUs, this run needs %d: waiting", resources.get("CPU", 0), needed)
    gpus, use_gpu = resources.get("GPU", 0), settings["device"] == "cuda"
    if use_gpu and gpus < scaling.least_workers:
        message = "this run trains on GPUs: the cluster has %g, it needs %d: waiting"
        get_logger().warning(message, gpus, scaling.least_workers)
    # Ray's list of reported checkpoints of an earlier start. Ray would load it, and fail because of deleted ones.
    (run / CHECKPOINTS / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"  # through NCCL, numbers of the host would wait for the GPU
    timeout = int(max(_BACKEND_SECONDS, 2 * scaling.watchdog_timeout_seconds))
    per_worker: dict[str, float] = {"CPU": scaling.cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    libraries = "" if use_gpu else _libraries(str(_ALLOCATOR), os.environ.get("LD_PRELOAD", ""))
    variables = {"LD_PRELOAD": libraries, "MALLOC_CONF": os.environ.get("MALLOC_CONF", _ALLOCATION)}
    return TorchTrainer(
        _train_loop,
        train_loop_config={**settings, "checkpoints": str(run / CHECKPOINTS)},
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=use_gpu,
            resources_per_worker=per_worker,
            elastic_resize_monitor_interval_s=scaling.elastic_resize_interval_seconds,
        ),
        torch_config=GroupConfig(backend=backend, timeout_s=timeout, deterministic=scaling.deterministic),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            storage_path=str(run),
            failure_config=ray.train.FailureConfig(max_failures=0),
            callbacks=_tune_callbacks(),
            worker_runtime_env={"env_vars": variables} if libraries else None,
        ),
    )


@cache  # warns once, not at each start of the group
def _libraries(allocator: str, before: str) -> str:
    """LD_PRELOAD of a worker, with the allocator behind what the user loads; empty if its path cannot be given."""
    if " " in allocator or ":" in allocator:
        message = "%s cannot be loaded into workers (LD_PRELOAD ends a path at a space or colon), so their memory may "
        get_logger().warning(message + "grow with the steps; install Ray in a folder without them", allocator)
        return ""
    return f"{before}:{allocator}" if before else allocator


def _tune_callbacks() -> list[Any]:
    """Passes reports on to Tune if this run is one of its trials."""
    if "ray.tune" not in sys.modules:
        return []
    from ray.tune.integration.ray_train import TuneReportCallback

    with contextlib.suppress(RuntimeError):  # Tune was imported, but does not run this process
        return [TuneReportCallback()]
    return []


def start_fit(trainer: Any) -> Future[Any]:
    """Runs `TorchTrainer.fit` in a thread, because the main thread handles signals and supervises.

    The result is the return value of the first worker after a successful end, or the error after any other end.
    """
    end = Future[Any]()

    def run() -> None:
        try:
            end.set_result(trainer.fit().return_value)
        except BaseException as error:  # noqa: BLE001 - judged by the supervisor
            end.set_exception(error)

    # daemon: a group that never ends must not keep the command
    threading.Thread(target=run, name="declutr-fit", daemon=True).start()
    return end


def kill_worker(heartbeat: dict[str, Any]) -> None:
    """Kills a worker's process on its host, even a stopped one. If that fails, Ray detects the dead worker itself."""
    there = NodeAffinitySchedulingStrategy(node_id=heartbeat["node"], soft=False)
    try:
        ray.get(_kill.options(num_cpus=0, scheduling_strategy=there).remote(heartbeat["pid"]), timeout=30)
    except RayError as error:  # the node is lost or does not answer
        get_logger().warning("cannot kill worker %d (pid %d): %s", heartbeat["rank"], heartbeat["pid"], error)


@ray.remote  # type: ignore[untyped-decorator]
def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended already
        os.kill(pid, signal.SIGKILL)


def _train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The function that Ray Train calls on every worker."""
    from declutr.trainer.worker.entry import train_loop  # loads torch and transformers, which the driver does not need

    return train_loop(settings)
