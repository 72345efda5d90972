"""Checks the settings of the held-out scores against the shards, before Ray starts."""

from declutr.common.bootstrap import MIN_ROWS
from declutr.common.paths import expand
from declutr.pipeline.shards.manifest import Manifest, data_hash
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import FOLLOWED, STSB
from declutr.trainer.metrics.interval import steps_between
from declutr.trainer.setup.config import TrainConfig

_MIN_VALIDATIONS = 5


def validation_problems(config: TrainConfig, manifest: Manifest, scored: Manifest | None) -> list[str]:
    """Reasons why the configured scores cannot be computed, one line each.

    Args:
        config: configuration of the run.
        manifest: manifest of the run's shards.
        scored: manifest of `validation.data`; None without, or if it cannot be read.
    """
    validation = config.validation
    if not validation.every_steps or (validation.data is not None and scored is None):
        return []
    if scored is None:
        rows, where = manifest.totals["kept_held_out"], f"held-out {manifest.noun}"
        few = "prepare with a larger validation_fraction, or set validation.stsb, or every_steps to 0"
    else:
        rows, where = scored.totals["kept_train"], f"training rows in {validation.data}"
        few = "prepare it with validation_fraction=0"
    found = []
    if rows < 2 and not (scored is None and validation.score == STSB):  # STS-B alone is scored
        found.append(
            f"validation.every_steps = {validation.every_steps}: the shards hold {rows} {where}, at least 2 are "
            f"needed; {few}"
        )
    if scored is not None:
        found += _other_data_problems(config, manifest, scored)
    return found + _score_problems(config, scored or manifest)


def stsb_problems(config: TrainConfig) -> list[str]:
    """Problems of STS-B's file, whose reader loads torch."""
    folder = config.validation.stsb
    if folder is None or not config.validation.every_steps:
        return []
    from declutr.trainer.metrics.sts import StsError, read_pairs

    try:
        read_pairs(expand(folder))
    except StsError as error:
        return [f"validation.stsb = {folder}: {error}"]
    return []


def validation_remarks(run: ResolvedRun, total_steps: int) -> list[str]:
    """Warnings about validations that are too few, or of too few rows, to tell an effect from chance.

    Args:
        run: without `validation_problems`.
        total_steps: number of steps of the run.
    """
    validation, found = run.config.validation, []
    every_steps = steps_between(validation.every_steps, total_steps)
    if not every_steps or validation.score == FOLLOWED:
        return []
    number = -(-total_steps // every_steps)
    if number < _MIN_VALIDATIONS:
        steps = "increase epochs or lower batch_documents"
        remedy = steps if total_steps < _MIN_VALIDATIONS else "set validation.every_steps=0.1"
        found.append(
            f"validation.every_steps = {validation.every_steps}: {number} validations in {total_steps} steps are too "
            f"few to show whether the encoder still improves, which needs {_MIN_VALIDATIONS}; {remedy}"
        )
    if validation.score == STSB:
        return found
    available = validated_rows(run)
    remedy = "prepare with a larger validation_fraction, or more documents"
    if available == validation.max_documents:
        remedy = "increase validation.max_documents"
    elif validation.data is not None:
        remedy = "prepare more rows in validation.data"
    if available < 2 * MIN_ROWS:
        found.append(
            f"{available} held-out {run.manifest.noun} are validated, and half of them report the result: an interval "
            f"needs {2 * MIN_ROWS}; {remedy}"
        )
    return found


def validated_rows(run: ResolvedRun) -> int:
    """Number of rows of each validation."""
    scored = run.scored
    available = run.manifest.totals["kept_held_out"] if scored is None else scored.totals["kept_train"]
    return min(available, run.config.validation.max_documents)


def _other_data_problems(config: TrainConfig, manifest: Manifest, scored: Manifest) -> list[str]:
    """Problems of `validation.data`."""
    named, found = f"validation.data = {config.validation.data}", []
    reads, kind = config.objective.reads, scored.content.kind
    if ("documents" in reads) != (kind == "documents"):  # a schema that the objective's validator cannot read
        found.append(
            f"{named}: holds {kind}, which objective {config.objective.kind} cannot score; name shards of "
            f"{' or '.join(reads)}, or remove the setting"
        )
    if data_hash(scored) == data_hash(manifest):
        found.append(f"{named}: these are the rows that the run trains on; name other shards, or remove the setting")
    made_by = [one.tokenizer and one.tokenizer.fingerprint for one in (scored, manifest)]
    if made_by[0] != made_by[1]:
        found.append(
            f"{named}: was prepared with another tokenizer than data = {config.data}; prepare it with that one"
        )
    return found


def _score_problems(config: TrainConfig, scored: Manifest) -> list[str]:
    """A problem if a checkpoint is chosen by a score that these rows do not have."""
    validation, kind = config.validation, scored.content.kind
    known = config.objective.scores_of(kind)
    if not config.chooses or validation.score not in config.objective.scores or validation.score in known:
        return []
    return [
        f"validation.score = {validation.score}: {kind} do not have this score; set validation.stsb (score = {STSB}), "
        "validation.data to shards of pairs or triples, or export=last"
    ]
