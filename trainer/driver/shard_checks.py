"""Checks the settings of objective, tokenizer and held-out scores against the shards, before Ray starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.common.storage import read_json
from declutr.pipeline.shards.joined import joined_manifest
from declutr.pipeline.shards.manifest import TOKENIZER, Manifest, data_hash
from declutr.trainer.metrics.config import STSB
from declutr.trainer.setup.config import TrainConfig

_FILE = "tokenizer.json"


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
    found = []
    if rows < 2 and not (scored is None and validation.score in validation.pairs):  # they alone are scored
        found.append(
            f"validation.every_steps = {validation.every_steps}: the shards hold {rows} {where}, at least 2 are "
            f"needed; {few}"
        )
    if scored is not None:
        found += _other_data_problems(config, corpora, scored)
    return found + _score_problems(config, scored or manifest)


def _other_data_problems(config: TrainConfig, corpora: Mapping[str, Sequence[Manifest]], scored: Manifest) -> list[str]:
    """Problems of `validation.data`."""
    main = corpora[""][0]
    named, found = f"validation.data = {config.validation.data}", []
    reads, kind = config.objective.reads, scored.content.kind
    if ("documents" in reads) != (kind == "documents"):  # a schema that the objective's validator cannot read
        found.append(
            f"{named}: holds {kind}, which objective {config.objective.kind} cannot score; name shards of "
            f"{' or '.join(reads)}, or remove the setting"
        )
    elif kind == "documents" and main.short_documents != scored.short_documents:
        found.append(
            f"{named}: was prepared with short_documents = {scored.short_documents}, data = {config.places[0]} with "
            f"{main.short_documents}; prepare both alike"
        )
    elif kind == "documents":  # a validation draws one anchor of each document
        context = config.context(scored.short_documents)
        context = replace(context, spans=context.spans.model_copy(update={"num_anchors": 1}))
        found += [f"{named}: {line}" for line in config.objective.problems(context, scored)]
    if any(data_hash(scored) == data_hash(one) for some in corpora.values() for one in some):
        found.append(f"{named}: these are the rows that the run trains on; name other shards, or remove the setting")
    made_by = [one.tokenizer and one.tokenizer.fingerprint for one in (scored, main)]
    if made_by[0] != made_by[1]:
        found.append(
            f"{named}: was prepared with another tokenizer than data = {config.places[0]}; prepare it with that one"
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
    *others, last = objective.reads
    kinds = f"{', '.join(others)} or {last}" if others else last
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
    alike = [one for one in corpora if one.content.kind == corpora[0].content.kind]
    found = [line for one in alike for line in config.objective.problems(config.context(one.short_documents), one)]
    sizes = [one.totals["kept_train"] for one in corpora]
    for place, manifest, size, most in zip(
        config.places, corpora, sizes, config.plan(sizes).most_in_batch(), strict=True
    ):
        if most > size:
            where = "the shards hold" if len(corpora) == 1 else f"a batch may need {most} rows of {place}, which holds"
            found.append(
                f"batch_documents = {config.batch_documents}: {where} only {size} training {manifest.noun}, and a "
                "batch must not contrast one of them with itself"
            )
    return list(dict.fromkeys(found))


def tokenizer_problem(config: TrainConfig, manifest: Manifest, data: Path) -> str | None:
    """The problem of an encoder whose tokenizer has another id for a token of the shards' tokenizer, by files alone.

    A tokenizer that is not on this machine, or differs otherwise, is compared when it is loaded (`encoder_problems`).

    Args:
        config: of the run.
        manifest: of its shards.
        data: folder of its shards.
    """
    name = config.encoder.pretrained
    if name is None or manifest.tokenizer is None:
        return None
    shards, encoder = _ids(data / TOKENIZER / _FILE), _ids(_file_of(name))
    token = next((token for token in shards if encoder.get(token, shards[token]) != shards[token]), None)
    if token is None:
        return None
    return (
        f"encoder.pretrained = {name}: its tokenizer is not the one that made the shards (the id of {token!r} is "
        f"{encoder[token]} in it and {shards[token]} in the shards); prepare the corpus with that tokenizer, "
        f"tokenizer.name={name}"
    )


def _file_of(name: str) -> Path | None:
    """The tokenizer of a folder or of a name in the hub's cache; None if it is not on this machine."""
    if (folder := expand(name)).is_dir():
        return folder / _FILE
    from huggingface_hub import try_to_load_from_cache  # imported here because not every run needs it
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _FILE)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _ids(path: Path | None) -> dict[str, int]:
    """Ids of a tokenizer's file by token; empty if it cannot be read."""
    try:
        vocabulary = {} if path is None else read_json(path)["model"]["vocab"]
        # Unigram has a list of tokens with their scores.
        return {row[0]: number for number, row in enumerate(vocabulary)} if isinstance(vocabulary, list) else vocabulary
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # loading it tells why
        return {}
