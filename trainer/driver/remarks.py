"""Warnings about a run that can start and may disappoint: too few validations, or corpora that do not go together."""

from collections.abc import Iterator

from declutr.common.bootstrap import MIN_ROWS
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import steps_between

_MIN_VALIDATIONS = 5
_OFTEN = 0.1  # of the batches


def validation_remarks(run: ResolvedRun, total_steps: int) -> list[str]:
    """Warnings about validations that are too few, or of too few rows, to tell an effect from chance.

    Args:
        run: without `validation_problems`.
        total_steps: number of steps of the run.
    """
    validation, remarks = run.config.validation, []
    every_steps = steps_between(validation.every_steps, total_steps)
    if not every_steps:
        return []
    number = -(-total_steps // every_steps)
    if number < _MIN_VALIDATIONS:
        steps = "increase epochs or lower batch_documents"
        remedy = steps if total_steps < _MIN_VALIDATIONS else "set validation.every_steps=0.1"
        remarks.append(
            f"validation.every_steps = {validation.every_steps}: {number} validations in {total_steps} steps are too "
            f"few to show whether the encoder still improves, which needs {_MIN_VALIDATIONS}; {remedy}"
        )
    if validation.score in validation.pairs:
        return remarks
    available = validated_rows(run)
    remedy = "prepare with a larger validation_fraction, or more documents"
    if available == validation.max_documents:
        remedy = "increase validation.max_documents"
    elif validation.data is not None:
        remedy = "prepare more rows in validation.data"
    if available < 2 * MIN_ROWS:
        remarks.append(
            f"{available} held-out {run.manifest.noun} are validated, and half of them report the result: an interval "
            f"needs {2 * MIN_ROWS}; {remedy}"
        )
    return remarks


def validated_rows(run: ResolvedRun) -> int:
    """Number of rows of each validation."""
    scored = run.scored
    available = run.manifest.totals["kept_held_out"] if scored is None else scored.totals["kept_train"]
    return min(available, run.config.validation.max_documents)


def corpora_remarks(run: ResolvedRun, total_steps: int) -> Iterator[str]:
    """Warnings about corpora that are small for their rows in a batch, or that hold out other texts than the first."""
    config, plan = run.config, run.plan
    read, sizes = plan.rows_read(total_steps), run.training_shards[""].sizes
    for place, share, size, rows in zip(config.places, plan.shares, sizes, read, strict=True):
        of_batch = config.batch_documents * share / sum(plan.shares)
        if config.objective.embeds and rows > size and of_batch > _OFTEN * size:
            yield (
                f"data = {place}: it has {size:,} training {run.manifest.noun}, of which a batch reads {of_batch:.3g}: "
                f"{of_batch / size:.0%} of the batches reach into its next pass and may hold a row twice, as its own "
                "negative; lower batch_documents or its weight"
            )
    if len(config.places) == 1 or run.scored is not None or not config.validation.every_steps:
        return
    names = ("validation_fraction", "seed")
    chosen = [[load_manifest(folder).config.get(name) for name in names] for folder in run.data[""]]
    for place, values in zip(config.places, chosen, strict=True):
        for name, value, first in zip(names, values, chosen[0], strict=True):
            if value != first:
                yield (
                    f"data = {place}: was prepared with {name} = {value}, {config.places[0]} with {first}: a text in "
                    "both may be held out in one and trained on in the other; prepare both alike"
                )
