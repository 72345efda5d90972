"""`declutr embed`: units of work, in this process or on Ray, to one file; resumes after a kill at any moment.

Until the output is complete, a hidden folder next to it holds a part and a sidecar for each finished unit.
"""

import contextlib
import fcntl
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from declutr.common.config import load_config
from declutr.common.console.logs import get_logger, input_bar
from declutr.common.console.terminal import excerpt
from declutr.common.errors import ConfigError, EncoderError, SessionError, UsageError, suggest
from declutr.common.paths import expand, listed
from declutr.common.storage import hash_file, hash_json, write_text
from declutr.embedding.note import Note, note_path, output_problem, parts_folder, read_note
from declutr.embedding.passages import Cutter
from declutr.embedding.pieces import Stored, earlier, joined_unit, stored_in, write_joined
from declutr.embedding.units import (
    MAX_UNITS,
    Coverage,
    EmbedConfig,
    EmbeddingSidecar,
    Shape,
    changes,
    check_records,
    embed_unit,
    finished,
    identify,
    part_schema,
    plan,
)
from declutr.encoders.protocol import (
    EncoderChoice,
    SentenceEncoder,
    in_role,
    no_encoder,
    precision_of,
    unloadable,
    vectors_fingerprint,
)
from declutr.pipeline.config import found_again
from declutr.pipeline.job.units import Unit, in_groups

SMALL_MIB = 16  # input below which this process embeds, because Ray's start would take longer than it saves
_MIB = 2**20
_LOCK = ".lock"
_CONTINUE = ". Finished units are kept; run the same command to continue"
_CPUS_PER_WORKER = 4
_RESTARTS = 10  # most deaths of workers in a command; an input that crashes a library would otherwise be tried for ever


def embed(
    model: str | PathLike[str],
    inputs: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    **settings: Any,
) -> Note:
    """Embed every text of files into one file, or the rest if an earlier call was stopped.

    For texts in memory: `load(model).encode(texts)`.

    Args:
        model: encoder, as `load` takes it.
        inputs: files, folders or globs: text lines, JSONL, Parquet, ..., also compressed.
        output: file to write, with a note next to it: .npy is `(texts, size)` in the order of the inputs; .parquet has
            the columns row, id if requested, embedding, and of passages start, end, line and heading.
        settings: the others of `EncoderChoice`, `Shape` and `EmbedConfig`: pooling, max_tokens, long_texts, precision,
            trust_remote_code; dimensions, normalise, dtype; text_field, id_field, format, passages, headings, skip_bad,
            unit_mib, workers.

    Returns:
        The note of the output: `rows`, `size` (numbers of an embedding), `skipped` by reason, and how much was read:
        `texts_cut`, `texts_empty`, `tokens`, `tokens_read`.

    Raises:
        ConfigError: with every problem of the settings.
        UsageError: inputs that cannot be read, an output that cannot be written, or a worker that keeps dying.
        EncoderError: the model cannot be loaded.
    """
    values = {"model": str(model), "inputs": listed(inputs), "output": expand(output, "output"), **settings}
    parts: dict[str, Any] = {
        key: {name: values.pop(name) for name in kind.model_fields if name in values}
        for key, kind in (("choice", EncoderChoice), ("shape", Shape))
    }
    flat = [*EncoderChoice.model_fields, *Shape.model_fields, *EmbedConfig.model_fields]
    settings_here = f"; known here: {', '.join(name for name in flat if name not in ('choice', 'shape'))}"
    if unknown := [f"{name}: unknown key{suggest(name, flat) or settings_here}" for name in values if name not in flat]:
        raise ConfigError("embed", unknown)
    if problem := unloadable(str(model)):
        encoders = [path for path in values["inputs"] if Path(path).is_dir() and not no_encoder(Path(path))]
        raise EncoderError(problem + "".join(f"; {path} is an encoder, which comes first" for path in encoders[:1]))
    try:
        config = load_config(parts | values, "embed", EmbedConfig)
    except ConfigError as error:  # `choice` and `shape` are no settings of the user
        problems = [problem.removeprefix("choice.").removeprefix("shape.") for problem in error.problems]
        raise ConfigError("embed", problems) from error
    # absolute paths, because workers run in another folder, and the note is read from anywhere
    places = [path if "://" in path else str(expand(path).absolute()) for path in config.inputs]
    choice = config.choice
    if Path(choice.model).exists():
        choice = choice.model_copy(update={"model": str(Path(choice.model).absolute())})
    config = config.model_copy(update={"inputs": places, "choice": choice, "output": config.output.absolute()})
    if config.output.name and (problem := read_again(config, [config.output, note_path(config.output)])):
        raise UsageError(f"--output {config.output}: {problem}")
    try:
        units = plan(config)
        if problem := output_problem(config.output):
            raise UsageError(f"--output {config.output}: {problem}")
        check_records(config, units)
        return _embed(config, units)
    except OSError as error:  # a full disk, or storage that is not reachable
        has_units = any(parts_folder(config.output).glob("*.json"))
        raise UsageError(f"{config.output}: {error}{_CONTINUE if has_units else ''}") from error


def read_again(config: EmbedConfig, files: Sequence[Path]) -> str | None:
    """The problem of files, an output and its notes, that a later command would read as texts of its inputs."""
    inputs = config.inputs
    if files[0].suffix != ".parquet" and config.format == "auto":  # no text, unless it is an input
        inputs = [path for path in inputs if os.path.realpath(path) == os.path.realpath(files[0])]
    return next((problem for file in files for problem in found_again(str(file), inputs, [""])), None)


def _embed(config: EmbedConfig, units: list[Unit]) -> Note:
    """Load the encoder, embed what is not done, assemble the parts, write the note, and remove the parts."""
    from declutr.encoders.loading import load_encoder  # loads torch, which no problem of the inputs waits for

    output, folder = config.output, parts_folder(config.output)
    if folder.is_dir():
        with _alone(folder, output):  # another command, or a damaged file, is named before the encoder is loaded
            pass
    before = None
    if output.is_file() and note_path(output).is_file():
        with contextlib.suppress(UsageError):  # a note that is damaged is of no finished job
            before = read_note(output)
        if not before or hash_file(output) != before.sha256:
            raise UsageError(f"--output {output}: its note is of another file; delete both, or name a new file")
    encoder = load_encoder(config.choice.model, **config.choice.model_dump(exclude={"model"}))
    document = in_role(encoder, "document")
    if config.choice.role is None and document is not encoder:
        # else a search for them would compare other vectors than those that the encoder learned to compare
        config = config.model_copy(update={"choice": config.choice.model_copy(update={"role": "document"})})
        encoder = document
    whole = getattr(encoder, "whole", encoder)
    if config.choice.role and getattr(whole, "role", None) is None:
        get_logger().warning("--role %s: has no effect, as %s declares no prompts", config.choice.role, encoder.name)
    if prompt := getattr(whole, "prompt", ""):
        get_logger().info("%r is put before every text", prompt)
    if config.shape.dimensions and config.shape.dimensions > encoder.size:
        raise UsageError(f"--dimensions {config.shape.dimensions}: {encoder.name} has only {encoder.size}")
    if config.passages:
        Cutter(encoder)  # its refusal need not wait for a unit
    identities = identify(config, units, encoder.fingerprint, precision_of(encoder))
    if before and before.job == hash_json(identities) and (config.skip_bad or not before.skipped):
        get_logger().info("%s is already complete; nothing to embed", output)
        _remove_leftovers(folder, output)
        return before
    if before and (changed := changes(before.config, config)):
        raise UsageError(f"--output {output}: was made with {changed}; name another file, or delete this one")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, output):
        known = earlier(output) if before else {}  # nobody replaces the file now
        if before and before.config.inputs != config.inputs and known.keys().isdisjoint(identities):
            get_logger().warning("%s has embeddings of %s, which are replaced", output, excerpt(before.config.inputs))
        pieces = _run(config, units, identities, folder, encoder, known)
        write_joined(output, pieces, part_schema(encoder.size, config))
        counts = [stored.piece for stored in pieces.values()]
        note = Note(
            config=config,
            fingerprint=encoder.fingerprint,
            precision=precision_of(encoder),
            size=config.shape.dimensions or encoder.size,
            rows=sum(piece.written for piece in counts),
            skipped=dict(sorted(sum((Counter(piece.skipped) for piece in counts), Counter[str]()).items())),
            lost=sorted({path for piece in counts for path in piece.lost}),
            **{name: sum(getattr(piece, name) for piece in counts) for name in Coverage.model_fields},
            job=hash_json(identities),
            num_bytes=output.stat().st_size,
            sha256=hash_file(output),
        )
        if note.skipped and not note.rows:
            get_logger().warning("%s: nothing is embedded, because no record could be read; check --text-field", output)
        if sentence := note.sentence():
            get_logger().warning("%s%s", sentence, "" if config.passages else "; --passages embeds all of a text")
        write_text(note_path(output), note.model_dump_json(indent=1) + "\n")  # marks the job as finished
        # After the note, or a kill would leave neither. What cannot be removed must not fail a job that is finished.
        shutil.rmtree(folder, ignore_errors=True)
    return note


def _remove_leftovers(folder: Path, output: Path) -> None:
    """Remove the parts of a finished job that was killed behind its note, if they are there and not in use."""
    with contextlib.suppress(UsageError, OSError), _alone(folder, output):
        written_ns = note_path(output).stat().st_mtime_ns
        # later ones are of an unfinished job with other settings, which may go on
        if all(path.stat().st_mtime_ns <= written_ns for path in folder.glob("*.json")):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path, output: Path) -> Iterator[None]:
    """Lock the folder of the parts for this command, until it or its process ends."""
    path = folder / _LOCK
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another command may end, and remove the folder, between `open` and `flock`.
            locked = path.is_file() and path.stat().st_ino == os.fstat(stream.fileno()).st_ino
        except BlockingIOError:
            locked = False
        if not locked:
            raise UsageError(f"--output {output}: another `declutr embed` is writing it; wait, or name another file")
        try:
            yield
        finally:
            if folder.is_dir() and [*folder.iterdir()] == [path]:
                shutil.rmtree(folder, ignore_errors=True)  # no part was written: a refusal leaves nothing behind
    with contextlib.suppress(OSError):  # NFS keeps a removed file, and with it the folder, until it is closed
        folder.rmdir()


def _run(
    config: EmbedConfig,
    pieces: list[Unit],
    identities: list[str],
    folder: Path,
    encoder: SentenceEncoder,
    known: Mapping[str, Stored],
) -> dict[str, Stored]:
    """The rows of every piece by its identity: those known, those of finished units, and those of the rest."""
    new = [number for number, identity in enumerate(identities) if identity not in known]
    if len(new) < len(pieces):
        get_logger().info("reusing %d of %d pieces of the inputs", len(pieces) - len(new), len(pieces))
    unit_mib = config.unit_mib or max(1, math.ceil(sum(pieces[n].weight for n in new) / _MIB / MAX_UNITS))
    # Neighbours fill batches together. Each is of another file, as two pieces of one file are larger, so a record's
    # file tells its piece.
    groups = in_groups(new, lambda n: pieces[n].weight, int(unit_mib * _MIB))
    units = [joined_unit(f"{name:05d}", [pieces[n] for n in group]) for name, group in enumerate(groups)]
    work = [(unit, hash_json([identities[n] for n in group])) for unit, group in zip(units, groups, strict=True)]
    existing = [finished(unit.name, identity, folder) for unit, identity in work]
    sidecars = {s.unit: s for s in existing if s and (config.skip_bad or not any(piece.skipped for piece in s.pieces))}
    todo = [(unit, identity) for unit, identity in work if unit.name not in sidecars]
    if sidecars:
        get_logger().info("reusing %d of %d finished units", len(sidecars), len(units))
    total = sum(unit.num_bytes for unit in units)
    left = sum(unit.num_bytes for unit, _ in todo)
    here = config.workers == 0 or (config.workers is None and sum(unit.weight for unit in units) < SMALL_MIB * _MIB)
    with input_bar(total, total - left, "embed") as progress:
        num_texts = 0

        def report(texts: int, num_bytes: int) -> None:
            nonlocal num_texts
            num_texts += texts
            seconds = max(1e-9, float(progress.format_dict["elapsed"]))  # the clock may not have moved yet
            progress.set_postfix_str(f"{num_texts:,} texts, {num_texts / seconds:,.0f} a second", refresh=False)
            progress.update(num_bytes)

        embedded: Iterator[EmbeddingSidecar]
        if here or not todo:
            embedded = (embed_unit(unit, folder, config, identity, encoder, report) for unit, identity in todo)
        else:
            embedded = _embed_on_ray(config, todo, folder, encoder, report)
        sidecars |= {sidecar.unit: sidecar for sidecar in embedded}
    stored = dict(known)
    for unit, group in zip(units, groups, strict=True):
        counts = zip([identities[n] for n in group], sidecars[unit.name].pieces, strict=True)
        stored |= stored_in(folder / f"{unit.name}.parquet", counts)
    return {identity: stored[identity] for identity in identities}


def _embed_on_ray(
    config: EmbedConfig,
    todo: Sequence[tuple[Unit, str]],
    folder: Path,
    encoder: SentenceEncoder,
    report: Callable[[int, int], None],
) -> Iterator[EmbeddingSidecar]:
    """Embed units on Ray, on all GPUs or else all CPUs; yield their sidecars as they finish.

    Every worker loads the encoder by its name, and refuses another than `encoder`. `report` is called with numbers of
    newly embedded texts and newly read input bytes.
    """
    from declutr.common.session import start_ray

    try:
        start_ray()
    except SessionError as error:
        raise UsageError(str(error)) from error
    import ray  # after the session, which keeps it quiet
    from ray.exceptions import RayActorError, WorkerCrashedError

    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    workers = max(1, min(config.workers or gpus or cpus // _CPUS_PER_WORKER, gpus or cpus))  # a head may have no CPU
    share: dict[str, int] = {"num_gpus": 1} if gpus else {"num_cpus": max(1, min(_CPUS_PER_WORKER, cpus // workers))}
    sizes, deaths = {unit.name: unit.num_bytes for unit, _ in todo}, 0
    while todo:
        items = [{"unit": unit.model_dump_json(), "identity": identity} for unit, identity in todo]
        rows = ray.data.from_items(items, override_num_blocks=len(items)).map(  # a block is what Ray computes again
            UnitEmbedder,
            fn_constructor_kwargs={"config": config, "folder": str(folder), "vectors": vectors_fingerprint(encoder)},
            concurrency=min(workers, len(items)),
            max_restarts=0,  # else Ray shows every user a line of its C++ (ray-project/ray#53727)
            **share,
        )
        try:
            for row in rows.iter_rows():
                if row["problem"]:
                    raise UsageError(row["problem"])
                sidecar = EmbeddingSidecar.model_validate_json(row["sidecar"])
                report(sum(piece.written for piece in sidecar.pieces), sizes[sidecar.unit])
                todo = [(unit, identity) for unit, identity in todo if unit.name != sidecar.unit]
                yield sidecar
        except (RayActorError, WorkerCrashedError) as error:
            deaths += 1
            if deaths > _RESTARTS:
                raise UsageError(f"workers keep dying ({error}){_CONTINUE}") from error
            get_logger().warning("a worker died; %d of %d units are embedded anew", len(todo), len(sizes))


class UnitEmbedder:
    """Ray worker with an encoder that embeds one unit after the other, if its `vectors_fingerprint` is `vectors`."""

    def __init__(self, config: EmbedConfig, folder: str, vectors: str) -> None:
        from declutr.encoders.loading import load_encoder

        self._config, self._folder = config, Path(folder)
        self._encoder = load_encoder(config.choice.model, **config.choice.model_dump(exclude={"model"}))
        self._problem = ""
        # The encoder that a name means may change meanwhile: that of a run is its newest checkpoint.
        if vectors_fingerprint(self._encoder) != vectors:
            self._problem = (
                f"{config.choice.model}: a worker loaded another encoder ({precision_of(self._encoder)}) than this "
                "command. Name a checkpoint or an export that does not change, or --precision fp32 or bf16"
            )

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        """Embed `{"unit": JSON, "identity": hash}`; return `{"sidecar": JSON, "problem": words}`."""
        if self._problem:
            return {"sidecar": "", "problem": self._problem}
        unit = Unit.model_validate_json(row["unit"])
        try:
            # finished before another worker died, which ended the pass that would have returned it
            sidecar = finished(unit.name, row["identity"], self._folder)
            sidecar = sidecar or embed_unit(unit, self._folder, self._config, row["identity"], self._encoder)
        except (OSError, UsageError) as error:  # if raised here, users would see a traceback of Ray
            return {"sidecar": "", "problem": f"{error}{_CONTINUE}"}
        return {"sidecar": sidecar.model_dump_json(), "problem": ""}
