"""Entry point of a worker of a group, called by Ray Train: its heartbeat, device and listener for stop notices."""

import math
from contextlib import nullcontext
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.util import get_current_placement_group

from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.watcher import Watcher
from declutr.trainer.data.stream import limit_resources
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.worker.backend import missing_gpu, newest_exchanges, signalled
from declutr.trainer.worker.channel import UNREACHABLE, ControlChannel, period
from declutr.trainer.worker.heartbeat import Heartbeat, HeartbeatLogHandler
from declutr.trainer.worker.reporter import Reporter
from declutr.trainer.worker.spotwatch import SpotWatch
from declutr.trainer.worker.stopwatch import Stopwatch
from declutr.trainer.worker.work import work


class Listener(Watcher):
    """Posts the heartbeat and reads stop notices, in a thread, while its block runs.

    A notice is a signal to this process, or the driver's entry in the control channel, which it makes after a signal to
    itself or when a node is about to be removed.

    Args:
        channel: the control channel.
        heartbeat: the worker's heartbeat.
        still_seconds: a worker that stays in one phase for this long adds its newest exchanges.
    """

    def __init__(self, channel: ControlChannel, heartbeat: Heartbeat, still_seconds: float = math.inf) -> None:
        super().__init__(period(heartbeat.size), "declutr-listener", at_once=True)
        self._channel, self._heartbeat = channel, heartbeat
        self._still_seconds = still_seconds
        self._received: str | None = None

    def notice(self) -> str | None:
        """Reason to save and stop, or None."""
        signal = signalled()
        return self._heartbeat.record_signal(signal) if signal else self._received

    def look(self) -> None:
        """Posts the heartbeat and reads the driver's notice."""
        self.notice()  # records a signal in the heartbeat even if the training thread hangs
        snapshot = self._heartbeat.snapshot()
        if snapshot["phase_seconds"] >= self._still_seconds:
            snapshot["flight"] = newest_exchanges()
        try:
            self._channel.post(snapshot)
            self._received = self._channel.stop_reason()
        except UNREACHABLE as error:  # Ray's head does not answer; if that lasts, Ray kills this process
            get_logger().debug("the control channel does not answer: %s", error)

    def _run(self) -> None:
        super()._run()
        self.look()  # posts the last log lines


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
    cloud = config.scaling.spot_notices
    spot_watch = nullcontext() if cloud is None or context.get_local_rank() else SpotWatch(cloud, heartbeat.node)
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

    device: torch.device = get_device()
    return device
