"""`declutr train --plan`: the cost and the reach of a run, from a few of its real steps here. Nothing is written."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from declutr.common.cluster import named_cluster
from declutr.common.console.terminal import duration
from declutr.common.errors import ConfigError
from declutr.trainer.build import Parts, build_parts, build_train_steps, build_validator
from declutr.trainer.data.batches import Collator, RankBatch, collated
from declutr.trainer.data.chunks import fetched
from declutr.trainer.driver.checks import corpora_remarks, load_problems, refuse, validated_rows, validation_remarks
from declutr.trainer.driver.continuation import kept_device
from declutr.trainer.metrics.config import num_validations
from declutr.trainer.metrics.metrics import memory_mib, peak_memory_mib
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan, kept_precision
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.worker.device import set_up_torch, torch_as_before
from declutr.trainer.worker.loop import take

_SECONDS = 5.0  # of the measured steps; a first step on CPUs that takes longer is the only one
_MOST_STEPS = 20
_COMPILING = 2  # steps in which a GPU's kernels are compiled
_SCORED = 64  # held-out rows of the validation that is measured
_DAY_SECONDS = 86_400.0
_LITTLE = 0.5  # share of the tokens below which the passes are named that would read it, were no token read twice


@dataclass(frozen=True)
class Trial:
    """Figures of the steps."""

    device: str  # cpu or cuda
    num_steps: int  # measured steps
    step_seconds: float  # time of a step, median
    step_tokens: float  # tokens of a step over all workers, mean
    validation_seconds: float  # time of a validation; 0 without one
    memory_mib: float  # peak memory of a worker


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """The estimate of a run, whose folder is only read, as text."""
    refuse(load_problems(plan))
    trial = try_steps(plan)
    config, steps, noun = plan.config, plan.total_steps, plan.manifest.noun
    size, workers = plan.training_shards[""].num_documents, config.scaling.least_workers
    validations, scored = _validations(plan)
    passes = steps * config.batch_documents / size
    seconds = steps * trial.step_seconds + (validations + 1) * trial.validation_seconds  # and that of the start
    advice = [*validation_remarks(plan), *corpora_remarks(plan, steps)]
    yield f"planned from {trial.num_steps} measured step(s) on {trial.device}:"
    yield f"  steps        {steps:,} of {config.batch_documents:,} {noun}: {passes:,.3g} pass(es) over {size:,}"
    if len(config.places) > 1:
        yield from (f"  corpus       {line}" for line in plan.corpus_lines(steps, config.places))
    yield f"  time         {duration(math.ceil(seconds))}, {trial.step_seconds:,.2f} s a step (and a minute for Ray)"
    if plan.manifest.content.kind == "documents" and len(plan.tasks) == 1:
        in_spans, totals = trial.step_tokens / config.batch_documents, plan.manifest.totals
        in_document = totals["num_tokens"] / totals["kept"]
        yield (
            f"  read         a pass reads spans of {in_spans:,.0f} tokens together, of the {in_document:,.0f} tokens "
            "of a document"
        )
        if (share := passes * in_spans / in_document) < _LITTLE:
            more = math.ceil(_LITTLE * passes / share)
            advice.append(
                f"at most {share:.0%} of the tokens are read: epochs={more} reads at most {share * more / passes:.0%} "
                f"of them in {duration(seconds * more / passes)}"
            )
    rows = f"{scored:,} held-out {noun}" if scored else "judged pairs"
    yield f"  validations  {f'{validations:,} on {rows}' if validations else 'none'}"
    yield f"  memory       up to {trial.memory_mib:,.0f} MiB for each of {workers} worker(s)"
    if seconds > _DAY_SECONDS:
        advice.append(f"steps={math.floor(_DAY_SECONDS / trial.step_seconds)} end within a day")
    if trial.device == "cpu" and (needed := workers * trial.memory_mib) > (available := memory_mib()):
        advice.append(
            f"{workers} workers need {needed:,.0f} MiB and this machine has {available:,.0f}; set a smaller "
            "microbatch_tokens"
        )
    if advice:
        yield "to consider:"
        yield from (f"  - {line}" for line in advice)


def _validations(plan: RunPlan) -> tuple[int, int]:
    """Number of validations after the first step, and of the held-out rows of each."""
    validation, steps = plan.config.validation, plan.total_steps
    scored = validated_rows(plan) if validation.every_steps else 0
    return (num_validations(validation.every_steps, steps, steps) if scored or validation.pairs else 0), scored


@torch_as_before()
def try_steps(
    plan: RunPlan,  # of the run, without problems; its folder is only read
) -> Trial:
    """Takes the first steps of a run as one of its workers would, without exchange with others."""
    transformers_logging.disable_progress_bar()
    plan = plan.changed(precision=kept_precision(plan.config.precision, plan.folder))
    config = plan.config
    device = _device(config.scaling, plan.folder)
    set_up_torch(config.scaling, config.precision, device)
    parts = build_parts(plan, Communicator(deterministic=config.scaling.elastic_determinism), device)
    skipping = plan.changed(on_nonfinite_loss="skip", max_skipped_steps=_MOST_STEPS)
    train_steps = build_train_steps(skipping, parts.tasks, plan.total_steps)
    seconds, tokens = list[float](), list[int]()
    untimed = _COMPILING if device.type == "cuda" else 1  # they also allocate memory
    while len(seconds) <= _MOST_STEPS and sum(seconds[untimed:]) < _SECONDS:
        step = len(seconds)
        began = time.perf_counter()
        batch = {name: _batch(plan, name, parts.collators[name], step, device) for name in plan.tasks}
        tokens.append(take(train_steps, batch, step + 1).num_tokens)
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
        step_seconds=sorted(measured)[len(measured) // 2] * crowding,  # other programs slow single steps
        step_tokens=workers * sum(tokens) / len(tokens),
        validation_seconds=_validation_seconds(plan, parts, device, _validations(plan)[1]),
        memory_mib=peak_memory_mib(),
    )


def _device(scaling: ScalingConfig, run: Path) -> torch.device:
    """The device that a run on this machine would choose."""
    kind = kept_device(scaling, run)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= scaling.least_workers else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train --plan", ["this run trains on GPUs, and torch finds none here; plan it where one is"])
    return torch.device(kind)


def _batch(plan: RunPlan, name: str, collator: Collator, step: int, device: torch.device) -> RankBatch:
    """The share of the last worker of a step of a task, the largest: that of the first may be empty."""
    order, workers = plan.orders[name], plan.config.scaling.least_workers
    start, end = order.slice(workers - 1, workers)
    epochs, documents = order.documents(step, step + 1, start, end)
    rows = fetched(plan.training_shards[name], documents, epochs, getattr(collator, "fetch", None)).combine_chunks()
    return collated(collator, rows, epochs, start, order.canonical_documents).to(device)


def _validation_seconds(plan: RunPlan, parts: Parts, device: torch.device, scored: int) -> float:
    """Time of a validation of `scored` held-out rows, from one of at most 64, and of all judged pairs."""
    few = max(2, min(scored, _SCORED))
    half = parts.tasks[0].autocast if device.type == "cuda" else None  # as the training loop

    def seconds(**changes: None) -> float:
        validation = plan.config.validation.model_copy(update={"max_documents": few, **changes})
        validator = build_validator(plan.changed(validation=validation), parts, device)
        began = time.perf_counter()
        if validator is not None:
            with torch.autocast(device.type, half, enabled=half is not None):
                validator.scores(parts.encoder)
        return time.perf_counter() - began

    if half is not None:
        seconds()  # chooses kernels
    # judged pairs do not grow with the held-out rows
    rest = seconds(stsb=None, sickr=None) if scored > few else 0.0
    return seconds() + rest * (scored / few - 1)
