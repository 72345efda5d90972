"""Entry point of a worker, called by Ray Train: builds the parts of the run and starts the training loop."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.util import get_current_placement_group

from declutr.common.console.logs import get_logger, setup_logging
from declutr.pipeline.shards.shards import ShardError, ShardSet
from declutr.trainer.checkpoints.saver import SaveError
from declutr.trainer.checkpoints.state import data_hashes, joint_hash
from declutr.trainer.checkpoints.store import fetch_run, store_of
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import Plan
from declutr.trainer.data.stream import Prefetcher, batches, limit_resources
from declutr.trainer.model.language_model import UnfitEncoderError
from declutr.trainer.objectives.base import ObjectiveError
from declutr.trainer.setup.build import build_collator, build_encoder, build_validator, load_tokenizer
from declutr.trainer.setup.cache import data_folder, run_folder
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import autocast_type, build_task, build_train_steps
from declutr.trainer.step.microbatch import Microbatch, MicrobatchError
from declutr.trainer.step.nonfinite_losses import NonFiniteLossError
from declutr.trainer.worker.backend import missing_gpu
from declutr.trainer.worker.channel import ControlChannel
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.heartbeat import CountedCommunicator, Heartbeat, HeartbeatLogHandler
from declutr.trainer.worker.listener import Listener
from declutr.trainer.worker.loop import TrainingLoop
from declutr.trainer.worker.reporter import Reporter
from declutr.trainer.worker.scheduler import TaskScheduler
from declutr.trainer.worker.spotwatch import SpotWatch
from declutr.trainer.worker.stopwatch import Stopwatch


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, and again after each failure.

    Args:
        settings: `config` (the TrainConfig as JSON), `device` (of the run), `channel` (name of the control channel),
            `marks` (the driver's part of the Stopwatch) and `checkpoints` (their folder as Ray Train knows it).

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
    channel, still_seconds = ControlChannel(settings["channel"]), config.scaling.watchdog_timeout_seconds / 2
    with Listener(channel, heartbeat, still_seconds) as listener, spot_watch:
        return _train(config, device, heartbeat, stopwatch, listener, Reporter(settings["checkpoints"]))


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


def _train(
    config: TrainConfig,
    device: torch.device,
    heartbeat: Heartbeat,
    stopwatch: Stopwatch,
    listener: Listener,
    reporter: Reporter,
) -> dict[str, Any] | None:
    comm = CountedCommunicator(heartbeat.rank, heartbeat.size, config.scaling.elastic_determinism, heartbeat)
    if device.type == "cuda" and autocast_type(config.precision, device) is not None:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
    elif config.scaling.elastic_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    with heartbeat.doing("fetching"):
        run = run_folder(config.run, config.cache)
        settings = config.tasks()
        folders = {name: data_folder(one.data, config.cache) for name, one in settings.items()}
        # the driver has checked the shards
        shards = {name: ShardSet(folder, "train", look=False) for name, folder in folders.items()}
        hashes = data_hashes({name: one.manifest for name, one in shards.items()})
        if store := store_of(config.run, run):
            fetch_run(store, {"config_hash": config.hash(), "data_hash": joint_hash(hashes)}, comm)
    try:
        tokenizer, vocabulary = load_tokenizer(shards[""].folder, shards[""].manifest)
        encoder = build_encoder(config, tokenizer).to(device).train()
        tasks = [
            build_task(config, name, encoder, one.manifest, comm, Microbatch.of(config.microbatch_tokens, device))
            for name, one in shards.items()
        ]
    except (ShardError, UnfitEncoderError, ObjectiveError) as error:
        return {"given_up": str(error)}
    resources, settled = ray.cluster_resources(), config.scaling.cpus_per_worker * comm.size
    limit_resources(
        comm.size * len(settings), resources.get("CPU", 0) - settled, resources.get("object_store_memory", 0)
    )
    plans = {
        name: Plan(one.seed, shards[name].num_documents, one.batch_documents, one.canonical_documents)
        for name, one in settings.items()
    }
    train_steps = build_train_steps(config, tasks, config.total_steps(plans[""]))
    collators = {task.name: build_collator(task.objective, encoder, vocabulary) for task in tasks}

    def read(name: str, done: int) -> Iterator[RankBatch]:
        fetch = getattr(collators[name], "fetch", None)
        place = comm.rank, comm.size, done, train_steps[-1].total_steps, settings[name].data
        return batches(rank_plan(plans[name], shards[name], *place, fetch=fetch), collators[name], device)

    def prefetch(done: int) -> Prefetcher:
        shares = zip(*(read(name, done) for name in settings), strict=True)
        return Prefetcher(dict(zip(settings, one, strict=True)) for one in shares)

    scheduler = TaskScheduler(train_steps)
    checkpointing = Checkpointing(config, run, hashes, scheduler, heartbeat, reporter)
    loop = TrainingLoop(
        config,
        run,
        device,
        scheduler,
        checkpointing,
        prefetch,
        validator=build_validator(config, scheduler.main.tasks[0], shards[""], tokenizer, device),
        stop=lambda: listener.notice() is not None,
        heartbeat=heartbeat,
        stopwatch=stopwatch,
    )
    try:
        step = loop.train()
    except (NonFiniteLossError, MicrobatchError, SaveError, UnfitEncoderError, ObjectiveError) as error:
        return {"given_up": str(error)}
    if step == scheduler.main.total_steps:
        return None
    if checkpointing.early:
        return {"early": True, "step": step}
    return {"stopped": listener.notice() or "a notice to another worker", "step": step}
