"""`declutr train --plan`: the cost and the reach of a run before it starts."""

import math
import os
from dataclasses import dataclass, field, replace

from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.driver.checks import load_problems, refuse
from declutr.trainer.driver.remarks import corpora_remarks, validated_rows, validation_remarks
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.setup.coverage import Coverage, joint_coverage

_LEAST_SECONDS = 60.0
"""Shortest duration that is shown in minutes."""
_DAY_SECONDS = 86_400.0
_LITTLE = 0.5
"""Share of the tokens below which a plan says what more passes would read."""
_MORE = 4


@dataclass(frozen=True)
class TrainEstimate:
    """Figures of a run, from its shards, its settings and a few of its steps."""

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
    corpora: list[str] = field(default_factory=list)
    """Rows that are read of each of several corpora, in words."""
    advice: list[str] = field(default_factory=list)
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


def plan_ahead(run: ResolvedRun) -> TrainEstimate:
    """Estimates a run, whose folder is only read.

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
    return replace(made, advice=_advice(run, made, main))


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
