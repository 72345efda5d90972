"""Entry point of a worker of a group, called by Ray Train: its heartbeat, listener and device.

A worker's listener for stop notices: signals to its process, and the driver's notice in the control channel.

The driver sends one after a signal to itself, or when a node is about to be removed.

Heartbeats and the stop notice of the workers of one host, in files, so that one of them asks Ray's head for all.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
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

_FRESH_PERIODS = 2.0  # a worker that has not written for this many periods has ended or stands still
_OLD_SECONDS = 86_400.0  # folders of killed workers are removed after this time
_PREFIX = "declutr-workers-"
_STOP = "stop"


class Mailbox:
    """Files of the workers of one host. Every call may raise OSError.

    Args:
        name: the same for the workers of one start on one host, and for no others.
        rank: number of this worker.
        seconds: period in which each worker writes.
        folder: folder on the host; None: that of temporary files.
    """

    def __init__(self, name: str, rank: int, seconds: float, folder: Path | None = None) -> None:
        self._folder = (folder or Path(tempfile.gettempdir())) / f"{_PREFIX}{name}"
        self._rank, self._fresh_seconds = rank, _FRESH_PERIODS * seconds

    def write(self, heartbeat: dict[str, Any]) -> None:
        """Replaces this worker's heartbeat."""
        if not self._folder.is_dir():
            for folder in self._folder.parent.glob(f"{_PREFIX}*"):  # of this user's earlier workers that were killed
                status = folder.stat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        self._replace(str(self._rank), json.dumps(heartbeat))

    def leads(self) -> bool:
        """True if this worker asks the head: it has the lowest rank of those that still write."""
        now = time.time()
        return self._rank == min(
            rank for rank, at in self._written() if rank == self._rank or now - at < self._fresh_seconds
        )

    def heartbeats(self) -> list[dict[str, Any]]:
        """The newest heartbeat of every worker of this host."""
        return [json.loads((self._folder / str(rank)).read_bytes()) for rank, _ in self._written()]

    def pass_on(self, reason: str) -> None:
        """Tells the other workers of this host to save and stop."""
        self._replace(_STOP, reason)

    def stop_reason(self) -> str | None:
        """Reason for the workers to save and stop, or None."""
        path = self._folder / _STOP
        return path.read_text(encoding="utf-8") if path.exists() else None

    def leave(self) -> None:
        """Removes the folder unless another worker still writes to it."""
        now = time.time()
        if not any(rank != self._rank and now - at < self._fresh_seconds for rank, at in self._written()):
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            (self._folder / str(self._rank)).unlink(missing_ok=True)

    def _written(self) -> list[tuple[int, float]]:
        """Ranks and Unix times of their heartbeats."""
        with os.scandir(self._folder) as found:
            return [(int(one.name), one.stat().st_mtime) for one in found if one.name.isdigit()]

    def _replace(self, name: str, text: str) -> None:
        """Writes a file that is never seen in part; it need not survive the host, so nothing is forced to disk."""
        aside = self._folder / f".{name}.{self._rank}.{threading.get_ident()}"  # two threads may write at a time
        aside.write_text(text, encoding="utf-8")
        aside.replace(self._folder / name)


class Listener(Watcher):
    """Posts heartbeats and reads stop notices, in a thread, while its block runs.

    One worker of each host does so for all of them; the others share files with it (trainer/worker/entry.py).

    Args:
        channel: the control channel.
        heartbeat: the worker's heartbeat.
        still_seconds: a worker that stays in one phase for this long adds its newest exchanges.
        folder: folder of the host's files; None: that of temporary files.
    """

    def __init__(
        self,
        channel: ControlChannel,
        heartbeat: Heartbeat,
        still_seconds: float = math.inf,
        folder: Path | None = None,
    ) -> None:
        seconds = period(heartbeat.size)
        super().__init__(seconds, "declutr-listener", at_once=True)
        self._channel, self._heartbeat = channel, heartbeat
        self._still_seconds = still_seconds
        self._received: str | None = None
        name = f"{channel.name}-{heartbeat.node}-{heartbeat.group}"
        self._mailbox = Mailbox(name, heartbeat.rank, seconds, folder)

    def notice(self) -> str | None:
        """Reason to save and stop, or None."""
        signal = signalled()
        return self._heartbeat.record_signal(signal) if signal else self._received

    def look(self) -> None:
        """Writes the heartbeat and reads the driver's notice."""
        self._look(last=False)

    def _look(self, last: bool) -> None:
        """The same; if it is the `last` time, the worker posts its heartbeat itself."""
        self.notice()  # records a signal in the heartbeat even if the training thread hangs
        snapshot = self._heartbeat.snapshot()
        if snapshot["phase_seconds"] >= self._still_seconds:
            snapshot["flight"] = newest_exchanges()
        try:
            self._mailbox.write(snapshot)
            self._received = self._mailbox.stop_reason()
            heartbeats = self._mailbox.heartbeats() if last or self._mailbox.leads() else []
        except (OSError, ValueError) as error:  # for example a full disk: this worker posts for itself
            get_logger().debug("the workers of this host share no files: %s", error)
            heartbeats = [snapshot]
        try:
            if heartbeats:
                self._channel.post(self._heartbeat.rank, heartbeats)
                self._received = self._channel.stop_reason()
        except UNREACHABLE as error:  # Ray's head does not answer; if that lasts, Ray kills this process
            get_logger().debug("the control channel does not answer: %s", error)
        if self._received:
            with contextlib.suppress(OSError):
                self._mailbox.pass_on(self._received)

    def _run(self) -> None:
        super()._run()
        self._look(last=True)  # posts the last log lines
        with contextlib.suppress(OSError):
            self._mailbox.leave()


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

    found: torch.device = get_device()
    return found
