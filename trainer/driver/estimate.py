"""`declutr train --plan`: the cost and the reach of a run before it starts, and their comparison with the outcome."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from pydantic import Field, ValidationError

from declutr.common.config import Strict
from declutr.common.console.logs import get_logger
from declutr.common.storage import hash_json, write_text
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.checkpoints.state import data_hashes
from declutr.trainer.driver.checks import load_problems, refuse
from declutr.trainer.driver.remarks import corpora_remarks, validated_rows, validation_remarks
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.driver.summary import read_seconds
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.setup.coverage import Coverage, joint_coverage

_LEAST_SECONDS = 60.0
"""Shortest run whose duration is compared; below it, the start of the workers dominates, which no step shows."""
_DAY_SECONDS = 86_400.0
_LITTLE = 0.5
"""Share of the tokens below which a plan says what more passes would read."""
_MORE = 4


class TrainEstimate(Strict):
    """Figures of a run, from its shards, its settings and a few of its steps."""

    plan_hash: str
    """Hash of the settings and the data."""
    noun: str
    """Noun for the rows of the shards."""
    steps: int
    batch_documents: int
    documents: int
    """Training rows of the main task."""
    passes: float
    """Passes over them."""
    num_tokens: int
    """Their tokens, about."""
    document_tokens: float
    """Mean tokens of a row."""
    pass_tokens: float
    """Mean tokens of a row that one pass reads."""
    span_tokens: float
    """Mean tokens of a row's spans in one pass, which may overlap."""
    read_share: float
    """Share of all tokens that the run reads at least once."""
    validations: int
    """Validations after the first step."""
    scored: int
    """Held-out rows of a validation."""
    device: str
    workers: int
    measured_steps: int
    step_seconds: float
    step_tokens: float
    """Tokens of a step over all workers, special ones included."""
    validation_seconds: float
    memory_mib: float
    """Most memory of a worker."""
    corpora: list[str] = Field(default_factory=list)
    """Rows that are read of each of several corpora, in words."""
    advice: list[str] = Field(default_factory=list)
    """Changes to consider, each with its reason."""

    @property
    def seconds(self) -> float:
        """Expected duration without the start of Ray and the workers."""
        return self.steps * self.step_seconds + (self.validations + 1) * self.validation_seconds

    def lines(self) -> list[str]:
        """The estimate as text."""
        noun = self.noun.removesuffix("s")
        rows = f"{self.scored:,} held-out {self.noun}" if self.scored else "judged pairs"
        scored = f"{self.validations:,} on {rows}" if self.validations else "none"
        return [
            f"planned from {self.measured_steps} measured step(s) on {self.device}:",
            f"  steps        {self.steps:,} of {self.batch_documents:,} {self.noun}: {self.passes:,.3g} pass(es) over "
            f"{self.documents:,}",
            *(f"  corpus       {line}" for line in self.corpora),
            f"  time         {_duration(self.seconds)}, {self.step_seconds:,.2f} s a step (and up to a minute for Ray)",
            f"  read         {self.read_share:.0%} of the corpus' {self.num_tokens:,} tokens: a pass reads about "
            f"{self.pass_tokens:,.0f} of the {self.document_tokens:,.0f} tokens of a {noun}, in spans of "
            f"{self.span_tokens:,.0f} tokens together",
            f"  validations  {scored}",
            f"  memory       up to {self.memory_mib:,.0f} MiB for each of {self.workers} worker(s)",
            *(["to consider:"] if self.advice else []),
            *(f"  - {line}" for line in self.advice),
        ]

    def against(self, run: Path) -> dict[str, tuple[float, float]]:
        """Estimate and outcome of a finished run, by name; empty without metrics.

        The duration is compared only if the run lasted a minute, and took all its steps.
        """
        steps = [line for line in read_metrics(run) if line["kind"] == "step" and line.get("seconds")]
        if not steps:
            return {}
        found = {
            "step_seconds": (self.step_seconds, median(line["seconds"] for line in steps)),
            "step_tokens": (self.step_tokens, sum(line["num_tokens"] for line in steps) / len(steps)),
            "memory_mib": (self.memory_mib, max(line["peak_memory_mib"] for line in steps)),
        }
        seconds = read_seconds(run)
        if len(steps) == self.steps and seconds >= _LEAST_SECONDS:
            found["seconds"] = (self.seconds, seconds)
        return {name: (round(told, 4), round(came, 4)) for name, (told, came) in found.items()}


def score(compared: Mapping[str, tuple[float, float]]) -> str:
    """One line with each estimate and its deviation from the outcome."""
    told = [f"{name} {expected:,.4g} ({expected / came - 1:+.0%})" for name, (expected, came) in compared.items()]
    return "estimated before: " + ", ".join(told)


def plan_ahead(run: ResolvedRun) -> TrainEstimate:
    """Estimates a run, and saves the estimate next to its folder, where the run finds it. The folder is only read.

    Raises:
        ConfigError: problems of the run.
        ShardError: the shards cannot be read.
        NonFiniteLossError: the losses of the first steps are not finite.
    """
    refuse(load_problems(run))
    config, manifest, shards = run.config, run.manifest, run.training_shards
    main = shards[""]
    size = main.num_documents
    steps = config.total_steps(run.plan)
    passes = steps * config.batch_documents / size
    tokens = sum(shard.num_tokens for shard in manifest.of_split("train"))
    every_steps = steps_between(config.validation.every_steps, steps)
    scored = validated_rows(run) if every_steps else 0
    read = _coverage(run, main, passes)
    from declutr.trainer.driver.trial import try_steps  # loads torch

    trial = try_steps(config, run.folder, shards, steps, scored)
    made = TrainEstimate(
        plan_hash=plan_hash(run),
        noun=manifest.noun,
        steps=steps,
        batch_documents=config.batch_documents,
        documents=size,
        passes=passes,
        num_tokens=round(tokens * size / manifest.totals["kept_train"]),
        document_tokens=read.num_tokens / read.num_documents,
        pass_tokens=read.pass_tokens / read.num_documents,
        span_tokens=read.span_tokens / read.num_documents,
        read_share=read.share,
        validations=-(-steps // every_steps) if every_steps and (scored or config.validation.pairs) else 0,
        scored=scored,
        device=trial.device,
        workers=config.scaling.least_workers,
        measured_steps=trial.num_steps,
        step_seconds=trial.step_seconds,
        step_tokens=trial.step_tokens,
        validation_seconds=trial.validation_seconds,
        memory_mib=trial.memory_mib,
        corpora=list(run.corpus_lines(steps, run.config.places)) if run.plan.sizes else [],
    )
    made = made.model_copy(update={"advice": _advice(run, made, main)})
    path = _path(run.folder)
    try:
        write_text(path, made.model_dump_json(indent=1) + "\n")
    except OSError as error:
        get_logger().warning("the estimate could not be saved for the end of the run: %s", error)
    return made


def plan_hash(run: ResolvedRun) -> str:
    """Identity of a plan: all settings but places, and the data."""
    settings = run.config.model_dump(mode="json", exclude={"run", "data", "cache"})
    weights = [list(run.plan.shares)] if run.plan.sizes else []
    return hash_json([settings, data_hashes(run.manifests), *weights])


def find_estimate(run: ResolvedRun) -> TrainEstimate | None:
    """The estimate of this run; None if there is none that can be read, or it is of other settings or data."""
    try:
        found = TrainEstimate.model_validate_json(_path(run.folder).read_bytes())
    except (OSError, ValidationError):  # must not stop the end of a run
        return None
    return found if found.plan_hash == plan_hash(run) else None


def _path(run: Path) -> Path:
    return run.with_name(f"{run.name}.estimate.json")


def _coverage(run: ResolvedRun, shards: ShardSet, passes: float) -> Coverage:
    context = run.config.context(shards.manifest.short_documents)
    return joint_coverage(run.config.objective, context, shards, run.plan, passes)


def _advice(run: ResolvedRun, made: TrainEstimate, shards: ShardSet) -> list[str]:
    """Settings to change, and why."""
    found = [*validation_remarks(run, made.steps), *corpora_remarks(run, made.steps)]
    if made.read_share < _LITTLE:
        more = math.ceil(_MORE * made.passes)
        share = _coverage(run, shards, more).share
        found.append(
            f"{1 - made.read_share:.0%} of the tokens are never read: epochs={more} reads {share:.0%} of them in "
            f"{_duration(made.seconds * more / made.passes)}"
        )
    if made.seconds > _DAY_SECONDS:
        found.append(f"steps={math.floor(_DAY_SECONDS / made.step_seconds)} end within a day")
    there, needed = _memory_mib(), made.workers * made.memory_mib
    if made.device == "cpu" and there is not None and needed > there:
        found.append(
            f"{made.workers} workers need {needed:,.0f} MiB and this machine has {there:,.0f}; set a smaller "
            "microbatch_tokens"
        )
    return found


def _memory_mib() -> float | None:
    """Memory of this machine in MiB; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return None


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:,.1f} minutes" if seconds >= _LEAST_SECONDS else f"{math.ceil(seconds)} seconds"
