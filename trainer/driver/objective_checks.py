"""Checks of an objective against the shards that it is to read, before Ray starts."""

from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.objectives.config import ObjectiveError
from declutr.trainer.setup.config import TrainConfig


def objective_problems(config: TrainConfig) -> list[str]:
    """Problems of the objective's package, which is loaded, with torch."""
    from declutr.trainer.objectives.base import implementation_of

    objective = config.objective
    try:
        implementation_of(objective)
    except ObjectiveError as error:
        return [str(error)]
    if objective.mlm and "mlm" not in objective.metrics:
        return [
            f"objective.kind = {objective.kind}: mlm is true, but metrics = {list(objective.metrics)} lacks 'mlm', so "
            "the MLM loss would not be recorded; add it"
        ]
    return []


def kind_problem(config: TrainConfig, manifest: Manifest) -> str | None:
    """The problem of shards whose rows the objective cannot read."""
    objective, kind = config.objective, manifest.content.kind
    if kind in objective.reads:
        return None
    *others, last = objective.reads
    kinds = f"{', '.join(others)} or {last}" if others else last
    return (
        f"objective.kind = {objective.kind} reads {kinds}; data = {config.data} holds {kind}: prepare it with "
        f"content.kind={objective.reads[0]}"
    )


def data_problems(config: TrainConfig, manifest: Manifest) -> list[str]:
    """Reasons why a task's objective cannot train on these shards, one line each, from their manifest alone.

    Args:
        config: configuration of the run, or that of a task.
        manifest: of its shards.
    """
    if other_kind := kind_problem(config, manifest):
        return [other_kind]
    found = config.objective.problems(config.context(manifest.short_documents), manifest)
    if config.batch_documents > manifest.totals["kept_train"]:
        found.append(
            f"batch_documents = {config.batch_documents}: the shards hold only {manifest.totals['kept_train']} "
            f"training {manifest.noun}, and a batch must not contrast one of them with itself"
        )
    return found
