"""What Ray Train calls on each worker: its parts are put together here, and handed to a Worker."""

from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.util import get_current_placement_group

from common.console.logs import get_logger, setup_logging
from pipeline.shards.manifest import data_hash
from pipeline.shards.shards import ShardError, ShardSet
from trainer.checkpoints.saver import SaveError
from trainer.checkpoints.store import fetch_run, store_of
from trainer.data.plan import Plan
from trainer.model.language_model import UnfitEncoderError
from trainer.setup.build import build_encoder, build_objective, build_stepper, load_tokenizer, total_steps
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import TrainConfig
from trainer.step.microbatch import Microbatch, MicrobatchError
from trainer.step.step import NonFiniteLossError
from trainer.worker.channel import ControlChannel
from trainer.worker.heartbeat import CountedWorld, Heartbeat, HeartbeatLogHandler, Stopwatch
from trainer.worker.listener import Listener
from trainer.worker.worker import Worker


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, again after each failure.

    Args:
        settings: `config`, the TrainConfig as JSON; `channel`, its name; `marks`, the driver's part of the Stopwatch.

    Returns:
        None at the last step; else `given_up`, why it cannot go on, or with `step`, which is saved, `stopped`, the
        notice it was stopped by, or `early`: its scores get no better. What would fail again is returned rather than
        raised, so that nobody tries again; every rank sees it alike, so none is left waiting.
    """
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
    with Listener(ControlChannel(settings["channel"]), heartbeat) as listener:
        return _train(config, heartbeat, stopwatch, listener)


def _train(
    config: TrainConfig, heartbeat: Heartbeat, stopwatch: Stopwatch, listener: Listener
) -> dict[str, Any] | None:
    world = CountedWorld(heartbeat.rank, heartbeat.size, heartbeat)
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
    with heartbeat.doing("fetching"):
        data, run = data_folder(config.data, config.cache), run_folder(config.run, config.cache)
        shards = ShardSet(data, "train", look=False)  # the driver has looked
        if store := store_of(config.run, run):
            expected = {"config_hash": config.hash(), "data_hash": data_hash(shards.manifest)}
            fetch_run(store, expected, world)
    try:
        tokenizer, vocabulary = load_tokenizer(shards.folder, shards.manifest)
    except ShardError as error:
        return {"given_up": str(error)}
    try:
        encoder = build_encoder(config, tokenizer).to(device).train()
    except UnfitEncoderError as error:
        return {"given_up": str(error)}
    plan = Plan(config.seed, shards.num_documents, config.batch_documents)
    microbatch = Microbatch.of(config.microbatch_tokens, device)
    objective = build_objective(config, encoder, shards.manifest)
    stepper = build_stepper(config, encoder, objective, world, total_steps(config, plan), microbatch)
    worker = Worker(
        config,
        run,
        shards,
        stepper,
        plan,
        vocabulary,
        device,
        notice=lambda: listener.notice() is not None,
        heartbeat=heartbeat,
        stopwatch=stopwatch,
    )
    try:
        step = worker.run_to_end()
    except (NonFiniteLossError, MicrobatchError, SaveError, UnfitEncoderError) as error:
        return {"given_up": str(error)}
    if step == stepper.total_steps:
        return None
    if worker.early:
        return {"early": True, "step": step}
    return {"stopped": listener.notice() or "a notice to another worker", "step": step}
