"""A worker's run: builds its parts and starts the training loop. Ray calls it in a group, or the driver without Ray."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch

from declutr.common.console.logs import get_logger
from declutr.common.errors import EncoderError, SaveError, ShardError, UsageError
from declutr.trainer.checkpoints.state import data_hashes, joint_hash
from declutr.trainer.checkpoints.store import fetch_run, store_of
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import rows_by_corpus
from declutr.trainer.data.stream import Prefetcher, batches
from declutr.trainer.setup.build import build_collator, build_encoder, build_validator, load_tokenizer
from declutr.trainer.setup.cache import run_folder, scored_contents, training_set
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import build_task, build_train_steps
from declutr.trainer.setup.torch_settings import refusal, set_up_torch
from declutr.trainer.step.microbatch import Microbatch, MicrobatchError
from declutr.trainer.step.nonfinite_losses import NonFiniteLossError
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.heartbeat import CountedCommunicator, Heartbeat
from declutr.trainer.worker.loop import TrainingLoop
from declutr.trainer.worker.reporter import Reporter
from declutr.trainer.worker.scheduler import TaskScheduler
from declutr.trainer.worker.stopwatch import Stopwatch


def work(
    config: TrainConfig,
    identity: dict[str, str],
    device: torch.device,
    heartbeat: Heartbeat,
    stopwatch: Stopwatch,
    notice: Callable[[], str | None],
    reporter: Reporter | None = None,
) -> dict[str, Any] | None:
    """Trains from the newest checkpoint to the last step, or to an earlier end.

    Args:
        config: of the run, with absolute paths.
        identity: of the run as the driver resolved it; every worker compares it with what it finds.
        device: of this worker.
        heartbeat: of this worker; it has its rank and the number of workers.
        stopwatch: of the start.
        notice: returns the reason to save and stop, or None.
        reporter: reports checkpoints to Ray Train; None: this process trains alone, without Ray.

    Returns:
        As `trainer/worker/entry.py`.
    """
    comm = CountedCommunicator(heartbeat.rank, heartbeat.size, config.scaling.elastic_determinism, heartbeat)
    set_up_torch(config, device)
    with heartbeat.doing("fetching"):
        run = run_folder(config.run, config.cache)
        settings = config.tasks()
        shards = {name: training_set(task_config) for name, task_config in settings.items()}
        hashes = data_hashes({name: split.manifest for name, split in shards.items()})
        contents, unreadable, _ = scored_contents(config)
        if unreadable:
            raise OSError("; ".join(unreadable.values()))  # of a storage it may pass: a group is started again
        here = {"data_hash": joint_hash(hashes), **config.with_contents(contents).contents}
        keys = [key for key, value in identity.items() if key != "config_hash" and here.get(key) != value]
        problem = ""
        if keys:
            places = " or ".join(place for task_config in settings.values() for place in task_config.places)
            names, host = " and ".join(places if key == "data_hash" else key for key in keys), socket.gethostname()
            problem = f"{names} on {host} differ from what this command began with; restore them, or name another run"
        if comm.all_reduce_max(int(bool(problem))):
            return _given_up(problem, comm.rank)
        identity = {key: identity[key] for key in ("config_hash", "data_hash")}
        if store := store_of(config.run, run):
            fetch_run(store, identity, comm)
    try:
        tokenizer, vocabulary = load_tokenizer(shards[""].folder, shards[""].manifest)
        encoder = build_encoder(config, tokenizer).to(device).train()
        tasks = [
            build_task(config, name, encoder, split.manifest, comm, Microbatch.of(config.microbatch_tokens, device))
            for name, split in shards.items()
        ]
    except (ShardError, EncoderError, UsageError) as error:
        problem = str(error)
    if comm.all_reduce_max(int(bool(problem))):  # a host may have other packages than the first one
        return _given_up(problem, comm.rank)
    plans = {name: task_config.plan(shards[name].sizes) for name, task_config in settings.items()}
    train_steps = build_train_steps(config, tasks, config.total_steps(plans[""]))
    collators = {task.name: build_collator(task.objective, encoder, vocabulary) for task in tasks}

    def read(name: str, done: int) -> Iterator[RankBatch]:
        fetch = getattr(collators[name], "fetch", None)
        place = comm.rank, comm.size, done, train_steps[-1].total_steps, settings[name].places
        plan = rank_plan(plans[name], shards[name], *place, fetch=fetch)
        return batches(plan, collators[name], device, tasks=reporter is not None)

    def prefetch(done: int) -> Prefetcher:
        shares = zip(*(read(name, done) for name in settings), strict=True)
        return Prefetcher(dict(zip(settings, rank_batches, strict=True)) for rank_batches in shares)

    scheduler = TaskScheduler(train_steps)
    checkpointing = Checkpointing(config, run, identity, hashes, scheduler, heartbeat, reporter)
    loop = TrainingLoop(
        config,
        run,
        device,
        scheduler,
        checkpointing,
        prefetch,
        validator=build_validator(
            config,
            scheduler.main.tasks[0],
            shards[""],
            tokenizer,
            device,
            [(task, shards[task.name]) for task in tasks if task.name],
        ),
        corpus_rows=lambda step: rows_by_corpus(plans, step),
        stop=lambda: notice() is not None,
        heartbeat=heartbeat,
        stopwatch=stopwatch,
    )
    try:
        step = loop.train()
    except (NonFiniteLossError, MicrobatchError, SaveError, EncoderError, UsageError) as error:
        return {"given_up": str(error)}
    except RuntimeError as error:
        refused = refusal(error)
        if refused is None:
            raise
        if comm.size > 1:  # the others may wait for this one
            raise RuntimeError(refused) from error
        return {"given_up": refused}
    if step == scheduler.main.total_steps:
        return None
    if checkpointing.early:
        return {"early": True, "step": step}
    return {"stopped": notice() or "a notice to another worker", "step": step}


def _given_up(problem: str, rank: int) -> dict[str, Any]:
    """The end of a worker that cannot take part, or of one whose peer cannot."""
    if problem and rank:
        get_logger().error("%s", problem)  # Ray shows the end of the first worker
    return {"given_up": problem or "another worker cannot take part; see its message"}
