"""`declutr train --plan`: the cost and the reach of a run before it starts."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from declutr.common.console.terminal import duration
from declutr.trainer.driver.checks import load_problems, refuse
from declutr.trainer.driver.remarks import corpora_remarks, validated_rows, validation_remarks
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.metrics.metrics import memory_mib

if TYPE_CHECKING:
    from declutr.trainer.driver.trial import Trial

_DAY_SECONDS = 86_400.0
_LITTLE = 0.5
"""Share of the tokens below which a plan names the passes that would read it, were no token read twice."""


@dataclass(frozen=True)
class TrainEstimate:
    """Figures of a run, from its shards, its settings and a few of its steps.

    Attributes:
        run: the run.
        steps: number of its steps.
        scored: held-out rows of a validation.
        validations: validations after the first step.
        trial: a few of its steps.
    """

    run: ResolvedRun
    steps: int
    scored: int
    validations: int
    trial: "Trial"

    @property
    def passes(self) -> float:
        """Passes over the training rows of the main task."""
        return self.steps * self.run.config.batch_documents / self.run.training_shards[""].num_documents

    @property
    def seconds(self) -> float:
        """Expected duration without the start of Ray and the workers."""
        return self.steps * self.trial.step_seconds + (self.validations + 1) * self.trial.validation_seconds

    @property
    def read_tokens(self) -> tuple[float, float] | None:
        """Tokens of a document's spans in a pass, and of a document; None if the rows are no documents or not alone."""
        totals = self.run.manifest.totals
        if self.run.manifest.content.kind != "documents" or len(self.run.training_shards) > 1:
            return None
        return self.trial.step_tokens / self.run.config.batch_documents, totals["num_tokens"] / totals["kept"]

    def lines(self) -> list[str]:
        """The estimate as text."""
        run, trial = self.run, self.trial
        size, noun = run.training_shards[""].num_documents, run.manifest.noun
        rows = f"{self.scored:,} held-out {noun}" if self.scored else "judged pairs"
        scored = f"{self.validations:,} on {rows}" if self.validations else "none"
        corpora = run.corpus_lines(self.steps, run.config.places) if run.plan.sizes else ()
        advice, workers = self._advice(), run.config.scaling.least_workers
        return [
            f"planned from {trial.num_steps} measured step(s) on {trial.device}:",
            f"  steps        {self.steps:,} of {run.config.batch_documents:,} {noun}: {self.passes:,.3g} pass(es) over "
            f"{size:,}",
            *(f"  corpus       {line}" for line in corpora),
            f"  time         {duration(math.ceil(self.seconds))}, {trial.step_seconds:,.2f} s a step (and a "
            "minute for Ray)",
            *(
                f"  read         a pass reads spans of {in_spans:,.0f} tokens together, "
                f"of the {in_document:,.0f} tokens of a document"
                for in_spans, in_document in filter(None, [self.read_tokens])
            ),
            f"  validations  {scored}",
            f"  memory       up to {trial.memory_mib:,.0f} MiB for each of {workers} worker(s)",
            *(["to consider:"] if advice else []),
            *(f"  - {line}" for line in advice),
        ]

    def _advice(self) -> list[str]:
        """Settings to change, and why."""
        advice = [*validation_remarks(self.run, self.steps), *corpora_remarks(self.run, self.steps)]
        if self.read_tokens and (share := self.passes * self.read_tokens[0] / self.read_tokens[1]) < _LITTLE:
            more = math.ceil(_LITTLE * self.passes / share)
            advice.append(
                f"at most {share:.0%} of the tokens are read: epochs={more} reads at most "
                f"{share * more / self.passes:.0%} of them in {duration(self.seconds * more / self.passes)}"
            )
        if self.seconds > _DAY_SECONDS:
            advice.append(f"steps={math.floor(_DAY_SECONDS / self.trial.step_seconds)} end within a day")
        workers = self.run.config.scaling.least_workers
        needed = workers * self.trial.memory_mib
        if self.trial.device == "cpu" and needed > (available := memory_mib()):
            advice.append(
                f"{workers} workers need {needed:,.0f} MiB and this machine has {available:,.0f}; set a smaller "
                "microbatch_tokens"
            )
        return advice


def plan_ahead(run: ResolvedRun) -> TrainEstimate:
    """Estimates a run, whose folder is only read.

    Raises:
        ConfigError: problems of the run.
        ShardError: the shards cannot be read.
        NonFiniteLossError: the losses of the first steps are not finite.
    """
    refuse(load_problems(run))
    config, shards, validation = run.config, run.training_shards, run.config.validation
    steps = config.total_steps(run.plan)
    every_steps = steps_between(validation.every_steps, steps)
    scored = validated_rows(run) if every_steps else 0
    validations = -(-steps // every_steps) if every_steps and (scored or validation.pairs) else 0
    from declutr.trainer.driver.trial import try_steps  # loads torch

    return TrainEstimate(run, steps, scored, validations, try_steps(config, run.folder, shards, steps, scored))
