"""A few real steps of a run in this process, which show their time and memory. Nothing is written."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from declutr.common.cluster import named_cluster
from declutr.common.errors import ConfigError
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import Collator, RankBatch
from declutr.trainer.data.canonical import collated
from declutr.trainer.data.chunks import fetched
from declutr.trainer.driver.device import kept_device
from declutr.trainer.metrics.config import ValidationConfig
from declutr.trainer.metrics.metrics import peak_memory_mib
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.build import build_collator, build_encoder, build_validator, load_tokenizer
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import build_task, build_train_steps
from declutr.trainer.setup.torch_settings import set_up_torch
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.worker.scheduler import TaskScheduler

_SECONDS = 5.0
"""Time of the measured steps; a first step on CPUs that takes longer is the only one."""
_MOST_STEPS = 20
_COMPILING = 2
"""Steps in which a GPU's kernels are compiled."""
_SCORED = 64
"""Held-out rows of the validation that is measured."""


@dataclass(frozen=True)
class Trial:
    """Figures of the steps.

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
        shards: training split of each task; "" for the main one.
        total_steps: of the run.
        scored: held-out rows of each validation; 0: there is none.

    Raises:
        NonFiniteLossError: a loss of these steps is not finite.
    """
    transformers_logging.disable_progress_bar()
    device = _device(config, run)
    set_up_torch(config, device)
    tokenizer, vocabulary = load_tokenizer(shards[""].folder, shards[""].manifest)
    encoder = build_encoder(config, tokenizer).to(device).train()
    comm = Communicator(deterministic=config.scaling.elastic_determinism)
    tasks = [
        build_task(config, name, encoder, split.manifest, comm, Microbatch.of(config.microbatch_tokens, device))
        for name, split in shards.items()
    ]
    skipping = config.model_copy(update={"on_nonfinite_loss": "skip", "max_skipped_steps": _MOST_STEPS})
    scheduler = TaskScheduler(build_train_steps(skipping, tasks, total_steps))
    collators = {task.name: build_collator(task.objective, encoder, vocabulary) for task in tasks}
    seconds, tokens = list[float](), list[int]()
    untimed = _COMPILING if device.type == "cuda" else 1  # they also allocate memory
    while len(seconds) <= _MOST_STEPS and sum(seconds[untimed:]) < _SECONDS:
        step = len(seconds)
        began = time.perf_counter()
        batch = {name: _batch(config, name, split, collators[name], step, device) for name, split in shards.items()}
        tokens.append(scheduler.take(batch, step + 1).num_tokens)
        seconds.append(time.perf_counter() - began)
        if device.type == "cpu" and seconds[0] > _SECONDS:
            break
    measured = seconds[untimed:] or seconds
    scaling, workers, crowding = config.scaling, config.scaling.least_workers, 1.0
    if device.type == "cpu" and not named_cluster(scaling.address)[1]:  # the workers share the CPUs of this machine
        crowding = max(1.0, workers * scaling.cpus_per_worker / (os.cpu_count() or 1))
    return Trial(
        device=device.type,
        num_steps=len(measured),
        step_seconds=sorted(measured)[len(measured) // 2] * crowding,
        step_tokens=workers * sum(tokens) / len(tokens),
        validation_seconds=_validation_seconds(config, scheduler, shards, tokenizer, device, scored),
        memory_mib=peak_memory_mib(),
    )


def _device(config: TrainConfig, run: Path) -> torch.device:
    """The device that a run on this machine would choose."""
    kind = kept_device(config.scaling, run)
    if kind == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= config.scaling.least_workers
        kind = "cuda" if enough else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train --plan", ["this run trains on GPUs, and torch finds none here; plan it where one is"])
    return torch.device(kind)


def _batch(
    config: TrainConfig, name: str, shards: ShardSet, collator: Collator, step: int, device: torch.device
) -> RankBatch:
    """The share of the first worker of a step of a task."""
    task = config.tasks()[name]
    plan = task.plan(shards.sizes)
    start, end = plan.slice(0, config.scaling.least_workers)
    epochs, documents = plan.documents(step, step + 1, start, end)
    rows = fetched(shards, documents, epochs, getattr(collator, "fetch", None)).combine_chunks()
    return collated(collator, rows, epochs, start, plan.canonical_documents).to(device)


def _validation_seconds(
    config: TrainConfig,
    scheduler: TaskScheduler,
    shards: Mapping[str, ShardSet],
    tokenizer: Any,
    device: torch.device,
    scored: int,
) -> float:
    """Time of a validation of `scored` held-out rows, from one of at most 64, and of all judged pairs."""
    few = max(2, min(scored, _SCORED))
    fewer = config.validation.model_copy(update={"max_documents": few})
    auxiliary = [(task, shards[task.name]) for step in scheduler.train_steps for task in step.tasks if task.name]
    main = scheduler.main.tasks[0]
    half = main.autocast if device.type == "cuda" else None  # as the training loop

    def seconds(validation: ValidationConfig) -> float:
        validator = build_validator(
            config.model_copy(update={"validation": validation}), main, shards[""], tokenizer, device, auxiliary
        )
        began = time.perf_counter()
        if validator is not None:
            with torch.autocast(device.type, half, enabled=half is not None):
                validator.scores(scheduler.main.encoder)
        return time.perf_counter() - began

    if half is not None:
        seconds(fewer)  # chooses kernels
    rest = seconds(fewer.model_copy(update={"stsb": None, "sickr": None})) if scored > few else 0.0
    return seconds(fewer) + rest * (scored / few - 1)
