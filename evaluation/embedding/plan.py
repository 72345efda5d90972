"""Plan of an embedding job: its units of work, and identities by which finished work is recognised."""

from pathlib import Path
from typing import Any

from common.console.logs import get_logger
from common.paths import expand
from common.storage import hash_json
from evaluation.embedding.config import EmbedConfig, EmbedError
from evaluation.embedding.units import corpus_of
from pipeline.job.units import Unit, hash_unit, mark_units, plan_units
from pipeline.readers.skipped import Skipped, describe_skipped

_MIB = 2**20
_MAX_UNITS = 4096
VERSIONS = (2, 1)
"""Versions of identities, current first. A note may have the older one, which identifies local files by time only."""


def located(config: EmbedConfig) -> EmbedConfig:
    """Job with absolute paths, because workers run in another folder, and the note is read from anywhere."""
    inputs = [path if "://" in path else str(expand(path).absolute()) for path in config.inputs]
    choice = config.choice
    if Path(choice.model).exists():
        choice = choice.model_copy(update={"model": str(Path(choice.model).absolute())})
    return config.model_copy(update={"inputs": inputs, "choice": choice, "output": config.output.absolute()})


def plan(config: EmbedConfig) -> list[Unit]:
    """Plan the units of the inputs, with the marks of their files.

    Raises:
        EmbedError: every problem that can be found before any work.
    """
    problems = []
    if config.output.suffix not in (".npy", ".parquet"):
        problems.append(f"--output {config.output}: must end in .npy or .parquet")
    if config.output.suffix == ".npy" and (config.id_field or config.skip_bad):
        problems.append(
            "ids and skipped rows need an --output that ends in .parquet, because .npy has row numbers only"
        )
    skipped = Skipped()
    units, found = plan_units(corpus_of(config, config.text_field), config.unit_mib or 1, skipped)
    if config.unit_mib is None and len(units) > _MAX_UNITS:
        mib = sum(unit.weight for unit in units) / _MIB / _MAX_UNITS
        units, found = plan_units(corpus_of(config, config.text_field), mib)
    if config.id_field and not found:
        found = plan_units(corpus_of(config, config.id_field), 1)[1]
    words = {"corpus.paths": "input", "corpus.format": "--format", "corpus.text_field": "--text-field or --id-field"}
    for problem in found:
        for ours, theirs in words.items():
            problem = problem.replace(ours, theirs)
        problems.append(problem)
    if problems:
        raise EmbedError("\n".join(problems))
    for line in describe_skipped(skipped.kinds()):
        get_logger().warning(line)
    return mark_units(units)


def identify(config: EmbedConfig, units: list[Unit], fingerprint: str, version: int = VERSIONS[0]) -> list[str]:
    """SHA-256 for each unit of its input, the encoder and the settings that decide its embeddings."""
    settings = config.model_dump(mode="json", exclude={"choice", "inputs", "output", "workers", "unit_mib"})
    if config.choice.precision != "auto":
        settings["precision"] = config.choice.precision
    settings |= {"version": version, "fingerprint": fingerprint, "suffix": config.output.suffix}
    return [hash_json([settings, hash_unit(unit), _seen(unit, version)]) for unit in units]


def jobs(config: EmbedConfig, units: list[Unit], fingerprint: str) -> set[str]:
    """Values of `Note.job` for this job, in every version."""
    return {hash_json(identify(config, units, fingerprint, version)) for version in VERSIONS}


def _seen(unit: Unit, version: int) -> Any:
    """Sizes, times, tags and samples of the unit's files; in version 1 the times alone."""
    if version == 1:
        paths = [Path(part.path) for part in unit.parts]
        return [path.stat().st_mtime_ns for path in paths if path.is_file()]
    return unit.stamp.model_dump() if unit.stamp else None
