"""`declutr embed`: units of work, in this process or on Ray, to one file; resumes after a kill at any moment.

Until the output is complete, a hidden folder next to it holds a part and a sidecar for each finished unit.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.console.bars import bar
from common.console.logs import get_logger
from common.paths import expand
from common.storage import hash_json
from evaluation.embedding.config import EmbedConfig, EmbedError, EncoderChoice
from evaluation.embedding.output import Note, assemble, note_path, read_note, write_note
from evaluation.embedding.units import EmbeddingSidecar, corpus_of, embed_unit, finished
from evaluation.encoders.loading import load_encoder
from evaluation.encoders.protocol import SentenceEncoder
from pipeline.job.units import Unit, hash_unit, mark_units, plan_units
from pipeline.readers.skipped import Skipped, describe_skipped

SMALL_MIB = 16
"""Input below which this process embeds, because Ray's start would take longer than it saves."""
_MIB = 2**20
_MAX_UNITS = 4096
_CPUS_PER_WORKER = 4
_RESTARTS = 10
"""Maximum restarts of a worker that dies; an input that crashes a library would otherwise restart it for ever."""
VERSIONS = (2, 1)
"""Versions of identities, current first. A note may have the older one, which identifies local files by time only."""
_LOCK = ".lock"


def encoder_of(choice: EncoderChoice, *, trust_remote_code: bool) -> SentenceEncoder:
    """Load the encoder of a job or an index.

    Args:
        choice: encoder and its treatment of long texts. It may come from somebody else's file, so the trust recorded in
            it is ignored.
        trust_remote_code: whether the current command trusts the model.

    Raises:
        EncoderError: the encoder cannot be loaded.
    """
    return load_encoder(
        choice.model,
        choice.pooling,
        max_tokens=choice.max_tokens,
        long_texts=choice.long_texts,
        trust_remote_code=trust_remote_code,
    )


def embed(config: EmbedConfig) -> Note:
    """Embed every text of the inputs, or the rest if an earlier run was stopped.

    Returns:
        The note, which is also written next to the output.

    Raises:
        EmbedError: inputs that cannot be read, settings that contradict each other, or a worker that keeps dying.
        EncoderError: the model cannot be loaded.
    """
    config = located(config)
    units = plan(config)
    encoder = encoder_of(config.choice, trust_remote_code=config.choice.trust_remote_code)
    if config.shape.dimensions and config.shape.dimensions > encoder.size:
        raise EmbedError(f"--dimensions {config.shape.dimensions}: {encoder.name} has only {encoder.size}")
    identities = identify(config, units, encoder.fingerprint)
    if done := _done(config.output, jobs(config, units, encoder.fingerprint)):
        get_logger().info("%s is already complete; nothing to embed", config.output)
        return done
    folder = config.output.absolute().with_name(f".{config.output.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, config.output):
        return _embedded(config, units, identities, folder, encoder)


@contextmanager
def _alone(folder: Path, output: Path) -> Iterator[None]:
    """Lock the folder of the parts for this command, until it or its process ends.

    Raises:
        EmbedError: another command holds the lock.
    """
    path = folder / _LOCK
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = path.is_file() and path.stat().st_ino == os.fstat(stream.fileno()).st_ino
        except BlockingIOError:
            held = False
        if not held:
            raise EmbedError(f"--output {output}: another `declutr embed` is writing it; wait, or name another file")
        yield


def _embedded(
    config: EmbedConfig, units: list[Unit], identities: list[str], folder: Path, encoder: SentenceEncoder
) -> Note:
    """Embed what is left, assemble the parts, write the note, and remove the parts."""
    sidecars = _run(config, units, identities, folder, encoder)
    num_rows = assemble(folder, sidecars, config, encoder.size)
    note = Note(
        config=config,
        fingerprint=encoder.fingerprint,
        size=config.shape.dimensions or encoder.size,
        rows=num_rows,
        skipped={
            reason: sum(sidecar.skipped.get(reason, 0) for sidecar in sidecars)
            for reason in sorted({reason for sidecar in sidecars for reason in sidecar.skipped})
        },
        job=hash_json(identities),
        num_bytes=config.output.stat().st_size,
    )
    write_note(note, config.output)
    shutil.rmtree(folder)
    return note


def located(config: EmbedConfig) -> EmbedConfig:
    """Job with absolute paths, because workers run in another folder, and the note is read from anywhere."""
    inputs = [path if "://" in path else str(expand(path).absolute()) for path in config.inputs]
    choice = config.choice
    if Path(choice.model).exists():
        choice = choice.model_copy(update={"model": str(Path(choice.model).absolute())})
    return config.model_copy(update={"inputs": inputs, "choice": choice, "output": config.output.absolute()})


def identify(config: EmbedConfig, units: list[Unit], fingerprint: str, version: int = VERSIONS[0]) -> list[str]:
    """SHA-256 for each unit of its input, the encoder and the settings that decide its embeddings."""
    settings = config.model_dump(mode="json", exclude={"choice", "inputs", "output", "workers", "unit_mib"})
    settings |= {"version": version, "fingerprint": fingerprint, "suffix": config.output.suffix}
    seen = _times if version == 1 else _contents
    return [hash_json([settings, hash_unit(unit), seen(unit)]) for unit in units]


def jobs(config: EmbedConfig, units: list[Unit], fingerprint: str) -> set[str]:
    """Values of `Note.job` for this job, in every version."""
    return {hash_json(identify(config, units, fingerprint, version)) for version in VERSIONS}


def _times(unit: Unit) -> list[int]:
    paths = [Path(part.path) for part in unit.parts]
    return [path.stat().st_mtime_ns for path in paths if path.is_file()]


def _contents(unit: Unit) -> dict[str, str | None] | None:
    """Sizes, times, tags and samples of the unit's files."""
    return unit.stamp.model_dump() if unit.stamp else None


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


def _done(output: Path, jobs: set[str]) -> Note | None:
    """Note of a finished output of this job, or None."""
    if not note_path(output).is_file():
        return None
    try:
        note = read_note(output)
    except EmbedError:  # the note is of another version, or its output is missing
        return None
    return note if note.job in jobs else None


def _run(
    config: EmbedConfig, units: list[Unit], identities: list[str], folder: Path, encoder: SentenceEncoder
) -> list[EmbeddingSidecar]:
    """Sidecars of the units in order: existing ones, and new ones from embedding the rest."""
    found = [finished(unit.name, identity, folder) for unit, identity in zip(units, identities, strict=True)]
    todo = [(unit, identity) for unit, identity, one in zip(units, identities, found, strict=True) if one is None]
    sidecars = {sidecar.unit: sidecar for sidecar in found if sidecar}
    if sidecars:
        get_logger().info("reusing %d of %d finished units", len(sidecars), len(units))
    total = sum(unit.num_bytes for unit in units)
    left = sum(unit.num_bytes for unit, _ in todo)
    here = config.workers == 0 or (config.workers is None and sum(unit.weight for unit in units) < SMALL_MIB * _MIB)
    with bar(
        total=total,
        initial=total - left,
        desc="embed",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} of input, {remaining} left{postfix}",
    ) as shown:
        progress = _Progress(shown)
        made = _here(config, todo, folder, encoder, progress) if here else _on_ray(config, todo, folder, progress)
        sidecars |= {sidecar.unit: sidecar for sidecar in made}
    return [sidecars[unit.name] for unit in units]


class _Progress:
    """Texts per second, shown next to the bar of input bytes."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._texts = bar, 0

    def add(self, texts: int, num_bytes: int) -> None:
        """Record newly embedded texts and input bytes."""
        self._texts += texts
        seconds = max(1e-9, float(self._bar.format_dict["elapsed"]))
        self._bar.set_postfix_str(f"{self._texts:,} texts, {self._texts / seconds:,.0f} a second", refresh=False)
        self._bar.update(num_bytes)


def _here(
    config: EmbedConfig,
    todo: Sequence[tuple[Unit, str]],
    folder: Path,
    encoder: SentenceEncoder,
    progress: _Progress,
) -> Iterator[EmbeddingSidecar]:
    for unit, identity in todo:
        yield embed_unit(unit, folder, config, identity, encoder, progress.add)


class UnitEmbedder:
    """Ray worker with an encoder that embeds one unit after the other."""

    def __init__(self, config: EmbedConfig, folder: str) -> None:
        self._config, self._folder = config, Path(folder)
        self._encoder = encoder_of(config.choice, trust_remote_code=config.choice.trust_remote_code)

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        """Embed `{"unit": JSON, "identity": hash}`; return `{"sidecar": JSON, "problem": words}`."""
        unit = Unit.model_validate_json(row["unit"])
        try:
            sidecar = embed_unit(unit, self._folder, self._config, row["identity"], self._encoder)
        except (OSError, EmbedError) as error:  # if raised here, users would see a traceback of Ray
            return {"sidecar": "", "problem": str(error)}
        return {"sidecar": sidecar.model_dump_json(), "problem": ""}


def _on_ray(
    config: EmbedConfig, todo: Sequence[tuple[Unit, str]], folder: Path, progress: _Progress
) -> Iterator[EmbeddingSidecar]:
    if not todo:
        return
    from common.session import start_ray
    from common.session_config import SessionError

    try:
        start_ray()
    except SessionError as error:
        raise EmbedError(str(error)) from error
    import ray  # after the session, which keeps it quiet
    from ray.exceptions import RayActorError, WorkerCrashedError

    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    workers = min(config.workers or gpus or max(1, cpus // _CPUS_PER_WORKER), gpus or cpus)
    share: dict[str, int] = {"num_gpus": 1} if gpus else {"num_cpus": max(1, min(_CPUS_PER_WORKER, cpus // workers))}
    items = [{"unit": unit.model_dump_json(), "identity": identity} for unit, identity in todo]
    sizes = {unit.name: unit.num_bytes for unit, _ in todo}
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
        UnitEmbedder,
        fn_constructor_kwargs={"config": config, "folder": str(folder)},
        concurrency=min(workers, len(items)),
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,
        **share,
    )
    try:
        for row in rows.iter_rows():
            if row["problem"]:
                raise EmbedError(f"{row['problem']}. Finished units are kept; run the same command to continue")
            sidecar = EmbeddingSidecar.model_validate_json(row["sidecar"])
            progress.add(sidecar.written, sizes[sidecar.unit])
            yield sidecar
    except (RayActorError, WorkerCrashedError) as error:
        raise EmbedError(
            f"workers keep dying ({error}). Finished units are kept; run the same command to continue"
        ) from error
