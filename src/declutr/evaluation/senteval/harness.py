"""Run an encoder through SentEval: embed each distinct sentence once, score every unit, write each result at once.

A unit is one task scored by one method. A killed evaluation resumes with the embedding parts and units on disk. A
finished one only reads its results. A folder of embedding parts belongs to one encoder (by fingerprint) and one list of
sentences (by hash); a part is a `.npy` file of at most 16,384 rows, complete or absent and read without unpickling.

Legend: N sentences, D embedding size.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.cluster import SessionConfig
from declutr.common.config import Strict
from declutr.common.console.terminal import duration
from declutr.common.errors import EncoderError
from declutr.common.session import start_ray
from declutr.common.storage import atomic_file, hash_json, read_json, write_json
from declutr.encoders.protocol import SentenceEncoder, vectors_fingerprint
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import Method, Protocol, Report, TaskResult, cost, method_for, needs_fits, score
from declutr.evaluation.senteval.similarity import collapse_warnings, sample_rows
from declutr.evaluation.senteval.tasks import TASKS, Inspection, TaskData, find, sentence_rows, sentences, without_train

VERSIONS: Mapping[Method, int] = {"procedure": 1, "cosine": 2, "geometry": 1}
"""Version of each scoring method; a new version invalidates stored scores."""
PART_ROWS = 16_384
_WORTH_IT = 5e6  # Cost of fits above which Ray's start-up of some seconds pays off: half a minute or more on one thread
_CACHE = "embeddings"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

Say = Callable[[str], None]
Take = Callable[["ScoringUnit"], NDArray[np.float32]]


class ScoringChoice(Strict):
    """Requested evaluation."""

    # Protocols: the papers whose procedures are followed.
    protocols: tuple[Protocol, ...] = Field(("senteval",), min_length=1)
    classifier: ClassifierConfig = ClassifierConfig()  # Classifier settings
    geometry: bool = True  # compute alignment and uniformity, of all sentences of STS-B

    def methods(self, task_name: str) -> tuple[Method, ...]:
        """Methods that score a task; STS-B also gets alignment and uniformity if they are chosen."""
        task = find(task_name)
        chosen = dict.fromkeys(method for protocol in self.protocols if (method := method_for(task, protocol)))
        return (*chosen, "geometry") if self.geometry and chosen and task.name == "STSBenchmark" else tuple(chosen)


class StoredUnit(Strict):
    """Content of a unit's file."""

    identity: str  # hash of encoder, data, method and settings
    task: str
    method: Method
    scores: Mapping[str, float]  # scores by name, see `scores.py`; empty if the unit failed
    # Errors of the test items in some of the scores (`Scored.items`); of an older call none.
    items: Mapping[str, tuple[float, ...]] = {}
    warnings: tuple[str, ...] = ()  # Warnings shown next to the score
    failed: str = ""  # reason for a missing score; "" if scored
    seconds: float = Field(ge=0)  # Scoring time, without embedding


@dataclass(frozen=True)
class ScoringUnit:
    """One task scored by one method, for one encoder."""

    data: TaskData
    method: Method
    identity: str  # hash of everything that decides the scores
    path: Path
    cost: float  # Expected time, relative to other units

    @property
    def key(self) -> tuple[str, Method]:
        """Task and method."""
        return self.data.task.name, self.method

    def stored(self) -> StoredUnit | None:
        """Result of an earlier call for the same encoder, data and settings, or None."""
        try:
            unit = StoredUnit.model_validate(read_json(self.path))
        except (OSError, ValueError):
            return None  # no file yet, or not a unit's file: compute the unit
        return unit if unit.identity == self.identity else None


@dataclass(frozen=True)
class Evaluated:
    """Results of one encoder."""

    encoder: str
    fingerprint: str
    size: int
    reports: Mapping[Protocol, Report]
    # Alignment and uniformity on STS-B; empty if not requested.
    geometry: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # Warnings about the encoder as a whole: collapsed, mostly zero
    seconds: float = 0.0  # summed scoring time of its units
    pretrained: str = ""  # name of the encoder it was trained from; "" if unknown


def evaluate(
    encoder: SentenceEncoder,
    inspections: Sequence[Inspection],
    choice: ScoringChoice,
    output: Path,
    session: SessionConfig,
    say: Say,
    whole: SentenceEncoder | None = None,
) -> Evaluated:
    """Score an encoder on all usable tasks, reusing the results in `output`.

    `output` takes `<encoder>-<fingerprint>/<task>.json` as units finish, and embeddings until the end. `session` runs
    the classifiers, `say` receives progress lines. `whole` is the encoder of which this one is a size, and which is
    scored after its sizes: the embeddings are its own and stay until then.

    Raises:
        EncoderError: an embedding is not finite.
    """
    fingerprint = vectors_fingerprint(encoder)
    folder = output / f"{_UNSAFE.sub('_', encoder.name).strip('_')[-60:]}-{fingerprint[:8]}"
    units = scoring_units(inspections, choice, fingerprint, folder)
    results = {unit.key: stored for unit in units if (stored := unit.stored())}
    todo = [unit for unit in units if unit.key not in results]
    notes = folder / "encoder.json"
    record = read_json(notes) if notes.is_file() else {}
    warnings = tuple(record["warnings"]) if record.get("fingerprint") == fingerprint else ()
    if todo:
        if results:
            say(f"{encoder.name}: reusing {len(results)} of {len(units)} results from an earlier run")
        scores, warnings = _score(encoder, whole or encoder, units, todo, choice, output, session, say)
        results |= scores
        write_json(notes, {"fingerprint": fingerprint, "warnings": list(warnings)})
    shutil.rmtree(output / _CACHE / fingerprint[:16], ignore_errors=True)  # scores are enough from now on
    geometry = results.get(("STSBenchmark", "geometry"))
    return Evaluated(
        encoder=encoder.name,
        fingerprint=fingerprint,
        size=encoder.size,
        reports={protocol: _report(encoder.name, protocol, inspections, results) for protocol in choice.protocols},
        geometry=dict(geometry.scores) if geometry else {},
        warnings=warnings,
        seconds=round(sum(unit.seconds for unit in results.values()), 3),
        pretrained=getattr(encoder, "pretrained", ""),
    )


def scoring_units(
    inspections: Sequence[Inspection], choice: ScoringChoice, fingerprint: str, folder: Path
) -> tuple[ScoringUnit, ...]:
    """Plan the units of all usable tasks, longest first, for the encoder with this fingerprint and folder."""
    units = []
    for inspection in (inspection for inspection in inspections if inspection.usable):
        data, task = inspection.data, inspection.task.name
        assert data is not None  # as all usable ones have
        for method in choice.methods(task):
            identity: list[Any] = [VERSIONS[method], fingerprint, task, method, dict(data.files), inspection.standing]
            identity.append(choice.classifier.identity())
            path = folder / f"{task}{'' if method == 'procedure' else f'.{method}'}.json"
            read = without_train(data) if method == "cosine" else data
            units.append(ScoringUnit(read, method, hash_json(identity), path, cost(read, method, choice.classifier)))
    return tuple(sorted(units, key=lambda unit: -unit.cost))  # a long one that starts last would run alone


def _score(
    encoder: SentenceEncoder,
    whole: SentenceEncoder,
    units: Sequence[ScoringUnit],
    todo: Sequence[ScoringUnit],
    choice: ScoringChoice,
    output: Path,
    session: SessionConfig,
    say: Say,
) -> tuple[dict[tuple[str, Method], StoredUnit], tuple[str, ...]]:
    """Embed the sentences of the units still to do by the whole encoder and score these units."""
    rows = sentence_rows(unit.data for unit in units)  # those left by a killed call: of finished units, too
    if not _parts_folder(output / _CACHE, whole, list(rows)).is_dir():
        rows = sentence_rows(unit.data for unit in todo)
    vectors = embed_all(whole, list(rows), output / _CACHE, say)
    warnings = collapse_warnings(vectors.take(sample_rows(len(rows)))[:, : encoder.size])
    for warning in warnings:
        say(f"{encoder.name}: WARNING: {warning}")

    def take(unit: ScoringUnit) -> NDArray[np.float32]:
        return vectors.take(np.array([rows[text] for text in sentences(unit.data)], np.int64))[:, : encoder.size]

    started, total, done = time.monotonic(), sum(unit.cost for unit in todo), 0.0
    results: dict[tuple[str, Method], StoredUnit] = {}
    for unit, stored in _score_units(todo, take, choice.classifier, session):
        write_json(unit.path, stored.model_dump(mode="json"))  # at once: a killed call keeps it
        results[unit.key] = stored
        done += unit.cost
        outcome = f"no score: {stored.failed}" if stored.failed else f"{duration(stored.seconds)}"
        name = unit.data.task.label + ("" if unit.method == "procedure" else f" ({unit.method})")
        say(f"{encoder.name}: {len(results)}/{len(todo)} {name} {outcome}{_time_left(started, done, total)}")
    return results, warnings


def _score_units(
    units: Sequence[ScoringUnit], take: Take, config: ClassifierConfig, session: SessionConfig
) -> Iterator[tuple[ScoringUnit, StoredUnit]]:
    """Yield units, given longest first, with their results as they finish.

    `take` returns the embeddings `(N, D)` of a unit's sentences; it is called when the unit's turn comes. `session` has
    a cluster's address, or the number of CPUs to use on this machine; 1 scores everything in this process.
    """
    fits = [unit for unit in units if needs_fits(unit.data.task, unit.method)]
    spread = len(fits) > 1 and session.num_cpus != 1
    if not spread or not (session.address or sum(unit.cost for unit in fits) > _WORTH_IT):
        for unit in units:
            yield unit, _score_unit(unit, take(unit), config)
        return
    start_ray(session.num_cpus, session.address)
    remote = ray.remote(num_cpus=1, max_retries=2)(_score_unit)
    limit = int(ray.cluster_resources().get("CPU", 1)) + 1  # not all embeddings must fit in memory at once
    waiting = list(units)
    running: dict[ray.ObjectRef, ScoringUnit] = {}
    while waiting or running:
        while waiting and len(running) < limit:
            unit = waiting.pop(0)
            running[remote.remote(unit, take(unit), config)] = unit
        finished, _ = ray.wait(list(running), num_returns=1)
        for reference in finished:
            yield running.pop(reference), ray.get(reference)


def _score_unit(unit: ScoringUnit, embeddings: NDArray[np.float32], config: ClassifierConfig) -> StoredUnit:
    """Score a unit; a task that cannot be fitted, such as own data with a class below the folds, gets a reason."""
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # steps are many and small: two threads would wait for each other at every one
    outcome: dict[str, Any]
    try:
        scored = score(unit.data, unit.method, embeddings, config)
        items = {name: tuple(errors.round(6).tolist()) for name, errors in scored.items.items()}
        outcome = {"scores": dict(scored.scores), "items": items, "warnings": scored.warnings}
    except ValueError as error:
        outcome = {"scores": {}, "failed": str(error)}
    finally:
        torch.set_num_threads(threads)  # this process may embed with the next encoder
    task, seconds = unit.data.task.name, round(time.monotonic() - started, 3)
    return StoredUnit(identity=unit.identity, task=task, method=unit.method, seconds=seconds, **outcome)


def _report(
    encoder: str, protocol: Protocol, inspections: Sequence[Inspection], units: Mapping[tuple[str, Method], StoredUnit]
) -> Report:
    results, missing = {}, {}
    for inspection in inspections:
        name, method = inspection.task.name, method_for(inspection.task, protocol)
        if method is None:
            continue
        unit = units.get((name, method))
        if unit is None or unit.failed:
            missing[name] = unit.failed if unit else inspection.reason
        else:
            assert inspection.data is not None  # as all usable ones have
            splits, warnings = inspection.data.splits, (*unit.warnings, *inspection.findings)
            scored = sum(len(split) for part, split in splits.items() if part not in ("train", "dev"))
            scores = dict(unit.scores)
            results[name] = TaskResult(name, protocol, scores, scored, inspection.standing, warnings, unit.items)
    for task in TASKS:
        if method_for(task, protocol) is not None and task.name not in results:
            missing.setdefault(task.name, "not asked for")
    return Report(encoder, protocol, results, missing)


@dataclass(frozen=True)
class Vectors:
    """`(N, D)` float32 embeddings, in mapped parts of `PART_ROWS` rows, the last of fewer."""

    parts: list[NDArray[np.float32]]

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows `(len(rows), D)` in the given order."""
        result = np.empty((len(rows), self.parts[0].shape[1]), np.float32)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(rows // PART_ROWS == number)
            result[here] = part[rows[here] - number * PART_ROWS]
        return result


def _stored(path: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """A part of embeddings; None if there is none of that shape."""
    try:
        # mapped: the embeddings of SNLI's sentences alone may not fit in memory
        part = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):  # missing or torn
        return None
    return part if part.shape == shape and part.dtype == np.float32 else None


def _parts_folder(cache: Path, encoder: SentenceEncoder, texts: Sequence[str]) -> Path:
    """Folder of an encoder's embedding parts for these texts."""
    digest = hashlib.sha256()
    for text in texts:
        # a separator, or lists that are cut at other places would be equal
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return cache / vectors_fingerprint(encoder)[:16] / f"{digest.hexdigest()[:16]}-{PART_ROWS}"


def embed_all(encoder: SentenceEncoder, texts: Sequence[str], cache: Path, say: Say) -> Vectors:
    """Embed N different texts; reuse the parts of an earlier call in a subfolder of `cache`."""
    folder = _parts_folder(cache, encoder, texts)
    chunks = [texts[start : start + PART_ROWS] for start in range(0, len(texts), PART_ROWS)]
    paths = [folder / f"part-{number:05d}.npy" for number in range(len(chunks))]
    shapes = [(len(chunk), encoder.size) for chunk in chunks]
    parts = [_stored(path, shape) for path, shape in zip(paths, shapes, strict=True)]
    missing = [number for number, part in enumerate(parts) if part is None]
    if len(missing) < len(parts):
        say(f"{encoder.name}: reusing {len(parts) - len(missing)} of {len(parts)} embedding parts")
    started = time.monotonic()
    for done, number in enumerate(missing, start=1):
        rows = np.ascontiguousarray(encoder.encode(chunks[number]), np.float32)
        if rows.shape != shapes[number]:
            raise EncoderError(f"{encoder.name}: embeddings are {rows.shape}, expected {shapes[number]}")
        if wrong := int((~np.isfinite(rows)).any(axis=1).sum()):
            raise EncoderError(
                f"{encoder.name}: {wrong:,} of {len(rows):,} embeddings have values that are not finite; no score"
            )
        with atomic_file(paths[number]) as aside, aside.open("wb") as stream:
            np.save(stream, rows)  # to a path without .npy, NumPy would append it
        more, end = _time_left(started, done, len(missing)), number * PART_ROWS + len(rows)
        say(f"{encoder.name}: embedded {end:,} of {len(texts):,} sentences{more}")
    return Vectors([np.load(path, mmap_mode="r", allow_pickle=False) for path in paths])


def _time_left(started: float, done: float, total: float) -> str:
    """Format the expected remaining time, `, about 3 min left`; "" below one second.

    `started` is on the monotonic clock; `done` and `total` are work in one unit.
    """
    left = (time.monotonic() - started) * (total - done) / done
    return f", about {duration(left)} left" if left >= 1 else ""
