"""Plan of an embedding job: its units of work, and identities by which finished work is recognised."""

from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.paths import expand
from declutr.common.storage import hash_json
from declutr.evaluation.embedding.config import EmbedConfig, EmbedError
from declutr.evaluation.embedding.units import corpus_of
from declutr.pipeline.job.units import Unit, fit_units, hash_unit, plan_units, with_file_states
from declutr.pipeline.readers.skipped import Skipped, describe_skipped

_MAX_UNITS = 4096


def located(config: EmbedConfig) -> EmbedConfig:
    """Job with absolute paths, because workers run in another folder, and the note is read from anywhere."""
    inputs = [path if "://" in path else str(expand(path).absolute()) for path in config.inputs]
    choice = config.choice
    if Path(choice.model).exists():
        choice = choice.model_copy(update={"model": str(Path(choice.model).absolute())})
    return config.model_copy(update={"inputs": inputs, "choice": choice, "output": config.output.absolute()})


def plan(config: EmbedConfig) -> list[Unit]:
    """Plan the units of the inputs, with the states of their files.

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
    corpus = corpus_of(config, config.text_field)
    _, units, found = fit_units(corpus, config.unit_mib, skipped, least_mib=1, most_units=_MAX_UNITS)
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
    return with_file_states(units)


def identify(config: EmbedConfig, units: list[Unit], fingerprint: str) -> list[str]:
    """SHA-256 for each unit of its input, the encoder and the settings that decide its embeddings."""
    settings = config.model_dump(mode="json", exclude={"choice", "inputs", "output", "workers", "unit_mib"})
    settings |= {"precision": config.choice.precision, "fingerprint": fingerprint, "suffix": config.output.suffix}
    return [
        hash_json([settings, hash_unit(unit), unit.input_state.model_dump() if unit.input_state else None])
        for unit in units
    ]
