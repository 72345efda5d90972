"""A few real steps of a run in this process, which show their time and memory. Nothing is written."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from common.cluster import named_cluster
from pipeline.shards.shards import ShardSet
from trainer.data.batches import RankBatch
from trainer.data.canonical import feed_units
from trainer.data.chunks import fetched
from trainer.data.feed import Feed
from trainer.data.plan import Plan
from trainer.driver.device import kept_device
from trainer.metrics.metrics import peak_memory_mib
from trainer.parallel.world import World
from trainer.setup.build import build_encoder, build_feed, build_validator, load_tokenizer
from trainer.setup.config import TrainConfig
from trainer.setup.turns import build_branch, build_turns
from trainer.step.microbatch import Microbatch
from trainer.worker.bad_losses import BadLosses
from trainer.worker.turns import Turn, Turns

_SECONDS = 5.0
"""Time of the measured steps; a first step that takes longer is the only one."""
_MOST_STEPS = 20
_SCORED = 64
"""Held-out rows of the validation that is measured."""


@dataclass(frozen=True)
class Trial:
    """What the steps showed.

    Attributes:
        device: cpu or cuda.
        num_steps: measured steps.
        step_seconds: time of a step, median.
        step_tokens: tokens of a step over all workers, mean.
        validation_seconds: time of a validation; 0 without one.
        memory_mib: peak memory of a worker.
    """

    device: str
    num_steps: int
    step_seconds: float
    step_tokens: float
    validation_seconds: float
    memory_mib: float


def try_steps(config: TrainConfig, run: Path, shards: dict[str, ShardSet], total_steps: int, scored: int) -> Trial:
    """Takes the first steps of a run as one of its workers would, without exchange with others.

    Args:
        config: of the run, without problems.
        run: its folder on this machine; only read.
        shards: training split of each branch; "" for the main one.
        total_steps: of the run.
        scored: held-out rows of each validation; 0: there is none.

    Raises:
        NonFiniteLossError: a loss of these steps is not finite.
    """
    transformers_logging.disable_progress_bar()
    device = _device(config, run)
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
    tokenizer, vocabulary = load_tokenizer(shards[""].folder, shards[""].manifest)
    encoder = build_encoder(config, tokenizer).to(device).train()
    world = World(deterministic=config.scaling.elastic_determinism)
    branches = [
        build_branch(config, name, encoder, one.manifest, world, Microbatch.of(config.microbatch_tokens, device))
        for name, one in shards.items()
    ]
    steppers = build_turns(config, branches, total_steps)
    turns = Turns([Turn(stepper, BadLosses(skip=True, most_in_a_row=_MOST_STEPS)) for stepper in steppers])
    feeds = {branch.name: build_feed(branch.objective, encoder, vocabulary) for branch in branches}
    seconds, tokens = list[float](), list[int]()
    while len(seconds) <= _MOST_STEPS and sum(seconds) < _SECONDS + min(seconds[:1], default=0.0):
        step = len(seconds)
        began = time.perf_counter()
        main, *others = (_batch(config, name, one, feeds[name], step, device) for name, one in shards.items())
        batch = replace(main, auxiliary=dict(zip(list(shards)[1:], others, strict=True)))
        tokens.append(turns.take(batch, step + 1).num_tokens)
        seconds.append(time.perf_counter() - began)
        if seconds[0] > _SECONDS:
            break
    measured = seconds[1:] or seconds  # the first one also allocates memory and compiles kernels
    workers = config.scaling.least_workers
    return Trial(
        device=device.type,
        num_steps=len(measured),
        step_seconds=sorted(measured)[len(measured) // 2] * _crowding(config, device),
        step_tokens=workers * sum(tokens) / len(tokens),
        validation_seconds=_validation_seconds(config, turns, shards[""], tokenizer, device, scored),
        memory_mib=peak_memory_mib(),
    )


def _device(config: TrainConfig, run: Path) -> torch.device:
    """The device that a run on this machine would choose."""
    kind = kept_device(config.scaling, run)
    if kind == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= config.scaling.least_workers
        kind = "cuda" if enough else "cpu"
    return torch.device(kind)


def _crowding(config: TrainConfig, device: torch.device) -> float:
    """The factor by which steps take longer because the workers of this machine have too few CPUs."""
    scaling = config.scaling
    if device.type != "cpu" or named_cluster(scaling.address)[1]:
        return 1.0
    return max(1.0, scaling.least_workers * scaling.cpus_per_worker / (os.cpu_count() or 1))


def _batch(config: TrainConfig, name: str, shards: ShardSet, feed: Feed, step: int, device: torch.device) -> RankBatch:
    """The share of the first worker of a step of a branch."""
    one = config.branches()[name]
    plan = Plan(one.seed, shards.num_documents, one.batch_documents, one.unit_documents)
    start, end = plan.slice(0, config.scaling.least_workers)
    epochs, documents = plan.documents(step, step + 1, start, end)
    rows = fetched(shards, documents, epochs, getattr(feed, "fetch", None)).combine_chunks()
    unit = plan.unit_documents
    batch = feed.feed(rows, epochs) if unit is None else feed_units(feed, rows, epochs, start // unit, unit)
    return replace(batch, digest=batch.spans.digest()).to(device)


def _validation_seconds(
    config: TrainConfig, turns: Turns, shards: ShardSet, tokenizer: Any, device: torch.device, scored: int
) -> float:
    """Time of a validation of `scored` held-out rows, from one of at most 64."""
    fewer = config.validation.model_copy(update={"max_documents": max(2, min(scored, _SCORED))})
    few = config.model_copy(update={"validation": fewer})
    validator = build_validator(few, turns.main.stepper, shards, tokenizer, device) if scored else None
    if validator is None:
        return 0.0
    began = time.perf_counter()
    validator.scores(turns.main.stepper.encoder)
    return (time.perf_counter() - began) * scored / min(scored, _SCORED)
