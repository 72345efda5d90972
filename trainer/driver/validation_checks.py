"""Checks the settings of the held-out scores against the shards, before Ray starts."""

from common.paths import expand
from common.stores.retry import RemoteError
from pipeline.shards.manifest import Manifest, ShardError, data_hash, load_manifest
from trainer.metrics.settings import STSB
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig


def validation_problems(config: TrainConfig, manifest: Manifest) -> list[str]:
    """Reasons why the configured scores cannot be computed, one line each.

    Args:
        config: configuration of the run.
        manifest: manifest of the run's shards.
    """
    validation = config.validation
    if not validation.every_steps:
        return []
    if validation.data is None:
        scored, rows, where = manifest, manifest.totals["kept_held_out"], f"held-out {manifest.noun}"
        few = "prepare with a larger held_out_share, or set it to 0"
    else:
        try:
            scored = load_manifest(data_folder(validation.data, config.cache))
        except (ShardError, RemoteError, OSError) as error:
            return [f"validation.data = {validation.data}: {error}"]
        rows, where = scored.totals["kept_train"], f"training rows in {validation.data}"
        few = "prepare it with held_out_share=0"
    found = []
    if rows < 2:
        found.append(
            f"validation.every_steps = {validation.every_steps}: the shards hold {rows} {where}, at least 2 are "
            f"needed; {few}"
        )
    if validation.data is not None:
        found += _other_data_problems(config, manifest, scored)
    found += _score_problems(config, scored)
    if validation.stsb is not None:
        from trainer.metrics.sts import StsError, read_pairs

        try:
            read_pairs(expand(validation.stsb))
        except StsError as error:
            found.append(f"validation.stsb = {validation.stsb}: {error}")
    return found


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
    chooses = config.export == "best" or validation.patience is not None
    known = config.objective.scores_of(kind)
    if not chooses or validation.score not in config.objective.scores or validation.score in known:
        return []
    return [
        f"validation.score = {validation.score}: {kind} do not have this score; set validation.stsb (score = {STSB}), "
        "validation.data to shards of pairs or triples, or export=last"
    ]
