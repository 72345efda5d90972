"""A worker's run: builds its parts and starts the training loop; in a group, its listener and its reports to Ray."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.torch import get_device
from ray.util import get_current_placement_group

from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.errors import EncoderError, SaveError, ShardError, UsageError
from declutr.common.watcher import Watcher
from declutr.trainer.build import build_parts, build_train_steps, build_validator, has_bf16
from declutr.trainer.checkpoints.store import store_of
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import rows_by_corpus
from declutr.trainer.data.stream import Prefetcher, batches, limit_resources
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import DEVICE, RunPlan
from declutr.trainer.step.gradcache import MicrobatchError
from declutr.trainer.step.step import NonFiniteLossError
from declutr.trainer.worker.backend import missing_gpu, signalled
from declutr.trainer.worker.channel import UNREACHABLE, ControlChannel, period
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.device import agree_precision, refusal, set_up_torch
from declutr.trainer.worker.heartbeat import Heartbeat, HeartbeatLogHandler
from declutr.trainer.worker.loop import TrainingLoop
from declutr.trainer.worker.spotwatch import SpotWatch


class Listener(Watcher):
    """Posts the heartbeat and reads stop notices, in a thread, while its block runs.

    A notice is a signal to this process, or the driver's entry in the control channel, which it makes after a signal to
    itself or when a node is about to be removed.
    """

    def __init__(self, channel: ControlChannel, heartbeat: Heartbeat) -> None:
        super().__init__(period(heartbeat.size), "declutr-listener", at_once=True)
        self._channel, self._heartbeat = channel, heartbeat
        self._received: str | None = None

    def notice(self) -> str | None:
        """Reason to save and stop, or None."""
        signal, heartbeat = signalled(), self._heartbeat
        if signal is None:
            return self._received
        heartbeat.notice = f"{signal} to worker {heartbeat.rank} (host {heartbeat.host}, pid {heartbeat.pid})"
        return heartbeat.notice

    def look(self) -> None:
        """Posts the heartbeat and reads the driver's notice."""
        self.notice()  # records a signal in the heartbeat even if the training thread hangs
        try:
            self._channel.post(self._heartbeat.snapshot())
            self._received = self._channel.stop_reason()
        except UNREACHABLE as error:  # Ray's head does not answer; if that lasts, Ray kills this process
            get_logger().debug("the control channel does not answer: %s", error)

    def _run(self) -> None:
        super()._run()
        self.look()  # posts the last log lines


def train_loop(
    # `config` (the TrainConfig as JSON), `identity` (see `work`), `device` (of the run), `channel` (name of the control
    # channel), `began` (begin of the start, Unix time) and `checkpoints` (their folder as Ray Train knows it).
    settings: dict[str, Any],
) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, and again after each failure.

    Returns:
        None after the last step. Otherwise `given_up` with the reason; or the saved `step` with `stopped`, the notice,
        or with `early` if the scores no longer improve. Errors that would recur are returned instead of raised, so that
        the group is not started again. Every rank returns them, so that none waits for another.
    """
    if problem := missing_gpu():
        raise RuntimeError(problem)
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
    # one worker of a host asks for all
    spot_watch = nullcontext() if cloud is None or context.get_local_rank() else SpotWatch(cloud, heartbeat.node)
    resources, settled = ray.cluster_resources(), config.scaling.cpus_per_worker * heartbeat.size
    streams = heartbeat.size * (1 + len(config.auxiliary_tasks))
    limit_resources(streams, resources.get("CPU", 0) - settled, resources.get("object_store_memory", 0))
    with Listener(ControlChannel(settings["channel"]), heartbeat) as listener, spot_watch:
        reporter = Reporter(settings["checkpoints"])
        # On CPUs Ray is not asked: it would return a GPU that it did not reserve for this worker.
        device = get_device() if settings["device"] == "cuda" else torch.device("cpu")
        return work(config, settings["identity"], device, heartbeat, settings["began"], listener.notice, reporter)


class Reporter:
    """Reports to Ray Train in a thread, so that no step waits for Ray or for another worker's report.

    Every worker reports equally often, because Ray waits for a report of each of them. Ray is told the checkpoint's
    folder; it copies and deletes nothing.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder  # of the run's checkpoints as Ray Train knows it: its `storage_path` and `name`
        self._reports: queue.SimpleQueue[tuple[dict[str, Any], Checkpoint | None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="declutr-reporter", daemon=True)
        self._thread.start()

    def report(
        self,
        metrics: Mapping[str, Any],  # numbers of the checkpoint's step; Ray shows those of the first worker
        name: str | None = None,  # of the checkpoint's folder; None on other workers than the first
    ) -> None:
        """Reports later, in order; all workers call it."""
        self._reports.put((dict(metrics), None if name is None else Checkpoint(f"{self._folder}/{name}")))

    def close(self) -> None:
        """Waits until everything is reported; only for the end of the training, because the other workers must come."""
        self._reports.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (report := self._reports.get()) is not None:
                metrics, checkpoint = report
                ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        except RayError as error:  # a process of Ray Train died; training needs none of these reports
            get_logger().warning("checkpoints are no longer reported to Ray Train: %s", str(error).partition("\n")[0])
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._error = error


def work(
    config: TrainConfig,  # of the run, as the driver resolved it
    identity: Mapping[str, str],  # of the driver's plan; every worker compares it with that of what it finds
    device: torch.device,  # of this worker
    heartbeat: Heartbeat,  # of this worker; it has its rank and the number of workers
    began: float,  # begin of the start (Unix time)
    notice: Callable[[], str | None],  # returns the reason to save and stop, or None
    reporter: Reporter | None = None,  # reports checkpoints to Ray Train; None: this process trains alone, without Ray
) -> dict[str, Any] | None:
    """Trains from the newest checkpoint to the last step, or to an earlier end; returns as `train_loop`."""
    comm = Communicator(heartbeat.rank, heartbeat.size, config.scaling.elastic_determinism)
    with heartbeat.doing("fetching"):
        plan = RunPlan.of(config)
        if plan.unreadable:
            raise OSError("; ".join(plan.unreadable.values()))  # of a storage it may pass: a group is started again
        shards, here = plan.training_shards, plan.identity
        keys = [key for key, value in identity.items() if key != "config_hash" and here.get(key) != value]
        problem = ""
        if keys:
            places = " or ".join(place for task in plan.tasks.values() for place in task.places)
            names, host = " and ".join(places if key == "data_hash" else key for key in keys), socket.gethostname()
            problem = f"{names} on {host} differ from what this command began with; restore them, or name another run"
        if comm.all_reduce_max(int(bool(problem))):
            return _given_up(problem, comm.rank)
        of_checkpoints = {key: identity[key] for key in ("config_hash", "data_hash")}
        if store := store_of(config.run, plan.folder):
            newest = store.fetch([DEVICE], of_checkpoints) if comm.rank == 0 else None
            # all take what rank 0 has verified and chosen
            step = comm.all_reduce_max(0 if newest is None else newest[1].step)
            if step and comm.rank != 0:
                store.fetch_step(step)
        precision = agree_precision(config.precision, plan.folder, device, has_bf16(device), comm)
        if store and comm.rank == 0 and config.precision == "auto":
            store.send(DEVICE)  # for the first worker of a later start, which may be on another host
    plan = plan.changed(precision=precision)
    set_up_torch(config.scaling, precision, device)
    try:
        parts = build_parts(plan, comm, device)
    except (ShardError, EncoderError, UsageError) as error:  # told to all below, who would wait for this worker
        problem = str(error)
    if comm.all_reduce_max(int(bool(problem))):  # a host may have other packages than the first one
        return _given_up(problem, comm.rank)
    train_steps = build_train_steps(plan, parts.tasks, plan.total_steps)

    def read(name: str, done: int) -> Iterator[RankBatch]:
        collator = parts.collators[name]
        place = comm.rank, comm.size, done, plan.total_steps, plan.tasks[name].places
        share = rank_plan(plan.orders[name], shards[name], *place, fetch=getattr(collator, "fetch", None))
        return batches(share, collator, device, tasks=reporter is not None)  # without Ray this process reads them

    def prefetch(done: int) -> Prefetcher:
        shares = zip(*(read(name, done) for name in plan.tasks), strict=True)
        return Prefetcher(dict(zip(plan.tasks, rank_batches, strict=True)) for rank_batches in shares)

    if device.type == "cuda" or plan.config.encoder.compile:
        with heartbeat.doing("choosing kernels"):
            first = {name: next(read(name, 0)) for name in plan.tasks}
            for train_step in train_steps:
                train_step.warm_up(first)
    checkpointing = Checkpointing(config, plan.folder, of_checkpoints, plan.hashes, train_steps, heartbeat, reporter)
    loop = TrainingLoop(
        config,
        plan.folder,
        device,
        train_steps,
        checkpointing,
        prefetch,
        validator=build_validator(plan, parts, device),
        corpus_rows=lambda step: rows_by_corpus(plan.orders, step),
        stop=lambda: notice() is not None,
        heartbeat=heartbeat,
        began=began,
    )
    try:
        step = loop.train()
    except UsageError as error:  # of an objective, on this worker perhaps alone
        return _given_up(str(error), comm.rank)
    except (NonFiniteLossError, MicrobatchError, SaveError, EncoderError) as error:
        return {"given_up": str(error)}
    except RuntimeError as error:
        refused = refusal(error)
        if refused is None:
            raise
        if comm.size > 1:  # the others may wait for this one
            raise RuntimeError(refused) from error
        return {"given_up": refused}
    if step == plan.total_steps:
        return None
    if checkpointing.early:
        return {"early": True, "step": step}
    return {"stopped": notice() or "a notice to another worker", "step": step}


def _given_up(problem: str, rank: int) -> dict[str, Any]:
    """The end of a worker that cannot take part, or of one whose peer cannot."""
    if problem and rank:
        get_logger().error("%s", problem)  # Ray shows the end of the first worker
    return {"given_up": problem or "another worker cannot take part; see its message"}
