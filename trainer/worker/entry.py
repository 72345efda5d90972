"""Entry point of a worker of a group, called by Ray Train: its heartbeat, listener and device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.util import get_current_placement_group

from declutr.common.console.logs import get_logger, setup_logging
from declutr.trainer.data.stream import limit_resources
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.worker.backend import missing_gpu
from declutr.trainer.worker.channel import ControlChannel
from declutr.trainer.worker.heartbeat import Heartbeat, HeartbeatLogHandler
from declutr.trainer.worker.listener import Listener
from declutr.trainer.worker.reporter import Reporter
from declutr.trainer.worker.spotwatch import SpotWatch
from declutr.trainer.worker.stopwatch import Stopwatch
from declutr.trainer.worker.work import work


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, and again after each failure.

    Args:
        settings: `config` (the TrainConfig as JSON), `identity` (see `work`), `device` (of the run), `channel` (name
            of the control channel), `marks` (the driver's part of the Stopwatch) and `checkpoints` (their folder as Ray
            Train knows it).

    Returns:
        None after the last step. Otherwise `given_up` with the reason; or the saved `step` with `stopped`, the notice,
        or with `early` if the scores no longer improve. Errors that would recur are returned instead of raised, so that
        the group is not started again. Every rank returns them, so that none waits for another.

    Raises:
        RuntimeError: a worker cannot use its GPU; on every rank.
    """
    if problem := missing_gpu():
        raise RuntimeError(problem)
    stopwatch = Stopwatch(settings["marks"])
    stopwatch.mark("group")
    config = TrainConfig.model_validate(settings["config"])
    context = ray.train.get_context()
    group = get_current_placement_group()
    heartbeat = Heartbeat(
        context.get_world_rank(),
        context.get_world_size(),
        group.id.hex() if group else "",
        ray.get_runtime_context().get_node_id(),
    )
    setup_logging(f"worker {heartbeat.rank}/{heartbeat.size}")
    get_logger().addHandler(HeartbeatLogHandler(heartbeat))
    spot_watch = _spot_watch(config.scaling.spot_notices, context.get_local_rank(), heartbeat.node)
    device = _device(settings["device"])
    heartbeat.follow(device)
    resources, settled = ray.cluster_resources(), config.scaling.cpus_per_worker * heartbeat.size
    streams = heartbeat.size * len(config.tasks())
    limit_resources(streams, resources.get("CPU", 0) - settled, resources.get("object_store_memory", 0))
    channel, still_seconds = ControlChannel(settings["channel"]), config.scaling.watchdog_timeout_seconds / 2
    with Listener(channel, heartbeat, still_seconds) as listener, spot_watch:
        return work(
            config,
            settings["identity"],
            device,
            heartbeat,
            stopwatch,
            listener.notice,
            Reporter(settings["checkpoints"]),
        )


def _device(kind: Literal["cpu", "cuda"]) -> torch.device:
    """This worker's device. On CPUs Ray is not asked: it would return a GPU that it did not reserve for this worker."""
    if kind == "cpu":
        return torch.device("cpu")
    from ray.train.torch import get_device

    found: torch.device = get_device()
    return found


def _spot_watch(cloud: Literal["aws", "gcp"] | None, local_rank: int, node: str) -> AbstractContextManager[Any]:
    """Watches for spot notices in one worker of each host."""
    return nullcontext() if cloud is None or local_rank else SpotWatch(cloud, node)
