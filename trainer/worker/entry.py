"""Entry point of a worker, called by Ray Train: builds the parts of the run and starts the training loop."""

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
from trainer.data.chunks import rank_plan
from trainer.data.plan import Plan
from trainer.data.stream import Ahead, batches
from trainer.model.language_model import UnfitEncoderError
from trainer.objectives.base import ObjectiveError
from trainer.setup.build import (
    build_encoder,
    build_feed,
    build_objective,
    build_stepper,
    build_validator,
    load_tokenizer,
    total_steps,
)
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import TrainConfig
from trainer.step.microbatch import Microbatch, MicrobatchError
from trainer.step.step import NonFiniteLossError
from trainer.worker.bad_losses import BadLosses
from trainer.worker.channel import ControlChannel
from trainer.worker.checkpointing import Checkpointing
from trainer.worker.heartbeat import CountedWorld, Heartbeat, HeartbeatLogHandler, Stopwatch
from trainer.worker.listener import Listener
from trainer.worker.loop import TrainingLoop


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, and again after each failure.

    Args:
        settings: `config` (the TrainConfig as JSON), `channel` (name of the control channel) and `marks` (the driver's
            part of the Stopwatch).

    Returns:
        None after the last step. Otherwise `given_up` with the reason; or the saved `step` with `stopped`, the notice,
        or with `early` if the scores no longer improve. Errors that would recur are returned instead of raised, so that
        the group is not started again. Every rank returns them, so that none waits for another.
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
        shards = ShardSet(data, "train", look=False)  # the driver has checked the shards
        if store := store_of(config.run, run):
            expected = {"config_hash": config.hash(), "data_hash": data_hash(shards.manifest)}
            fetch_run(store, expected, world)
    try:
        tokenizer, vocabulary = load_tokenizer(shards.folder, shards.manifest)
        encoder = build_encoder(config, tokenizer).to(device).train()
        objective = build_objective(config, encoder, shards.manifest)
    except (ShardError, UnfitEncoderError, ObjectiveError) as error:
        return {"given_up": str(error)}
    plan = Plan(config.seed, shards.num_documents, config.batch_documents)
    microbatch = Microbatch.of(config.microbatch_tokens, device)
    stepper = build_stepper(config, encoder, objective, world, total_steps(config, plan), microbatch)
    feed = build_feed(objective, encoder, vocabulary)

    def prefetch(done: int) -> Ahead:
        mine = rank_plan(plan, shards, world.rank, world.size, done, stepper.total_steps, config.data)
        return Ahead(batches(mine, feed, device))

    bad_losses = BadLosses(config.on_bad_loss == "skip", config.max_skipped_steps)
    checkpointing = Checkpointing(config, run, data_hash(shards.manifest), stepper, bad_losses, heartbeat)
    loop = TrainingLoop(
        config,
        run,
        device,
        stepper,
        bad_losses,
        checkpointing,
        prefetch,
        validator=build_validator(config, stepper, shards, tokenizer, device),
        stop=lambda: listener.notice() is not None,
        heartbeat=heartbeat,
        stopwatch=stopwatch,
    )
    try:
        step = loop.train()
    except (NonFiniteLossError, MicrobatchError, SaveError, UnfitEncoderError, ObjectiveError) as error:
        return {"given_up": str(error)}
    if step == stepper.total_steps:
        return None
    if checkpointing.early:
        return {"early": True, "step": step}
    return {"stopped": listener.notice() or "a notice to another worker", "step": step}
