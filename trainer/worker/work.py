"""A worker's run: builds its parts and starts the training loop. Ray calls it in a group, or the driver without Ray."""

import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from declutr.common.console.logs import get_logger
from declutr.common.errors import EncoderError, SaveError, ShardError, UsageError
from declutr.trainer.build import build_parts, build_train_steps, build_validator
from declutr.trainer.checkpoints.store import fetch_run, store_of
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import rows_by_corpus
from declutr.trainer.data.stream import Prefetcher, batches
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan
from declutr.trainer.step.gradcache import MicrobatchError
from declutr.trainer.step.step import NonFiniteLossError
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.device import refusal, set_up_torch
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.loop import TrainingLoop

if TYPE_CHECKING:  # loads Ray, which a run without it does not need
    from declutr.trainer.worker.entry import Reporter


def work(
    config: TrainConfig,
    identity: Mapping[str, str],
    device: torch.device,
    heartbeat: Heartbeat,
    began: float,
    notice: Callable[[], str | None],
    reporter: "Reporter | None" = None,
) -> dict[str, Any] | None:
    """Trains from the newest checkpoint to the last step, or to an earlier end.

    Args:
        config: of the run, as the driver resolved it.
        identity: of the driver's plan; every worker compares it with that of what it finds.
        device: of this worker.
        heartbeat: of this worker; it has its rank and the number of workers.
        began: begin of the start (Unix time).
        notice: returns the reason to save and stop, or None.
        reporter: reports checkpoints to Ray Train; None: this process trains alone, without Ray.

    Returns:
        As `trainer/worker/entry.py`.
    """
    comm = Communicator(heartbeat.rank, heartbeat.size, config.scaling.elastic_determinism)
    set_up_torch(config, device)
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
            fetch_run(store, of_checkpoints, comm)
    try:
        parts = build_parts(plan, comm, device)
    except (ShardError, EncoderError, UsageError) as error:
        problem = str(error)
    if comm.all_reduce_max(int(bool(problem))):  # a host may have other packages than the first one
        return _given_up(problem, comm.rank)
    train_steps = build_train_steps(plan, parts.tasks, plan.total_steps)

    def read(name: str, done: int) -> Iterator[RankBatch]:
        collator = parts.collators[name]
        place = comm.rank, comm.size, done, plan.total_steps, plan.tasks[name].places
        share = rank_plan(plan.orders[name], shards[name], *place, fetch=getattr(collator, "fetch", None))
        return batches(share, collator, device, tasks=reporter is not None)

    def prefetch(done: int) -> Prefetcher:
        shares = zip(*(read(name, done) for name in plan.tasks), strict=True)
        return Prefetcher(dict(zip(plan.tasks, rank_batches, strict=True)) for rank_batches in shares)

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
    except (NonFiniteLossError, MicrobatchError, SaveError, EncoderError, UsageError) as error:
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
