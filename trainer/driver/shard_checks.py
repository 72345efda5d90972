"""Checks the settings of objective and held-out scores against the shards, before Ray starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from declutr.common.errors import UsageError
from declutr.pipeline.shards.manifest import Manifest, data_hash, joined_manifest
from declutr.trainer.metrics.config import STSB
from declutr.trainer.setup.config import TrainConfig


def validation_problems(
    config: TrainConfig, corpora: Mapping[str, Sequence[Manifest]], scored: Manifest | None
) -> list[str]:
    """Reasons why the configured scores cannot be computed, one line each.

    Args:
        config: configuration of the run.
        corpora: manifests of the shards of each task; "" is the main one.
        scored: manifest of `validation.data`; None without, or if it cannot be read.
    """
    validation, manifest = config.validation, joined_manifest(corpora[""])
    if not validation.every_steps or (validation.data is not None and scored is None):
        return []
    if scored is None:
        rows, where = manifest.totals["kept_held_out"], f"held-out {manifest.noun}"
        few = "prepare with a larger validation_fraction, or set validation.stsb, or every_steps to 0"
    else:
        rows, where = scored.totals["kept_train"], f"training rows in {validation.data}"
        few = "prepare it with validation_fraction=0"
    problems = []
    if rows < 2 and not (scored is None and validation.score in validation.pairs):  # they alone are scored
        problems.append(
            f"validation.every_steps = {validation.every_steps}: the shards hold {rows} {where}, at least 2 are "
            f"needed; {few}"
        )
    if scored is not None:
        problems += _other_data_problems(config, corpora, scored)
    kind, score = (scored or manifest).content.kind, validation.score
    if config.chooses and score in config.objective.scores and score not in config.objective.scores_of(kind):
        problems.append(
            f"validation.score = {score}: {kind} do not have this score; set validation.stsb (score = {STSB}), "
            "validation.data to shards of pairs or triples, or export=last"
        )
    return problems


def _other_data_problems(config: TrainConfig, corpora: Mapping[str, Sequence[Manifest]], scored: Manifest) -> list[str]:
    """Problems of `validation.data`."""
    main = corpora[""][0]
    label, problems = f"validation.data = {config.validation.data}", []
    reads, kind = config.objective.reads, scored.content.kind
    if ("documents" in reads) != (kind == "documents"):  # a schema that the objective's validator cannot read
        problems.append(
            f"{label}: holds {kind}, which objective {config.objective.kind} cannot score; name shards of "
            f"{' or '.join(reads)}, or remove the setting"
        )
    elif kind == "documents" and main.short_documents != scored.short_documents:
        problems.append(
            f"{label}: was prepared with short_documents = {scored.short_documents}, data = {config.places[0]} with "
            f"{main.short_documents}; prepare both alike"
        )
    elif kind == "documents":  # a validation draws one anchor of each document
        context = config.context(scored.short_documents)
        context = replace(context, spans=context.spans.model_copy(update={"num_anchors": 1}))
        problems += [f"{label}: {line}" for line in config.objective.problems(context, scored)]
    if any(data_hash(scored) == data_hash(manifest) for manifests in corpora.values() for manifest in manifests):
        problems.append(f"{label}: these are the rows that the run trains on; name other shards, or remove the setting")
    made_by = [manifest.tokenizer and manifest.tokenizer.fingerprint for manifest in (scored, main)]
    if made_by[0] != made_by[1]:
        problems.append(
            f"{label}: was prepared with another tokenizer than data = {config.places[0]}; prepare it with that one"
        )
    return problems


def objective_problems(config: TrainConfig) -> list[str]:
    """Problems of the objective's package, which is loaded, with torch."""
    from declutr.trainer.objectives.base import implementation_of

    objective = config.objective
    try:
        implementation_of(objective)
    except UsageError as error:
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
    *rest, last = objective.reads
    kinds = f"{', '.join(rest)} or {last}" if rest else last
    return (
        f"objective.kind = {objective.kind} reads {kinds}; data = {config.places[0]} holds {kind}: prepare it with "
        f"content.kind={objective.reads[0]}"
    )


def data_problems(config: TrainConfig, corpora: Sequence[Manifest]) -> list[str]:
    """Reasons why a task's objective cannot train on these shards, one line each, from their manifests alone.

    Args:
        config: configuration of the run, or that of a task.
        corpora: manifests of its shards.
    """
    if other_kind := kind_problem(config, corpora[0]):
        return [other_kind]
    alike = [corpus for corpus in corpora if corpus.content.kind == corpora[0].content.kind]
    problems = [
        line for corpus in alike for line in config.objective.problems(config.context(corpus.short_documents), corpus)
    ]
    sizes = [corpus.totals["kept_train"] for corpus in corpora]
    for place, manifest, size, need in zip(
        config.places, corpora, sizes, config.plan(sizes).most_in_batch(), strict=True
    ):
        if need > size:
            where = "the shards hold" if len(corpora) == 1 else f"a batch may need {need} rows of {place}, which holds"
            problems.append(
                f"batch_documents = {config.batch_documents}: {where} only {size} training {manifest.noun}, and a "
                "batch must not contrast one of them with itself"
            )
    return list(dict.fromkeys(problems))
