"""Run an encoder through SentEval: embed each distinct sentence once, score every unit, write each result at once.

A killed evaluation resumes with the embedding parts and units on disk. A finished one only reads its results.

Classifier steps are many and small. Two threads wait for each other at every step; two processes do not.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from declutr.common.cluster import SessionConfig
from declutr.common.console.terminal import duration
from declutr.common.session import start_ray
from declutr.common.storage import read_json, write_json
from declutr.encoders.cut import CutEncoder
from declutr.encoders.protocol import SentenceEncoder, vectors_fingerprint
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.taskdata import Inspection, TaskData, sentence_rows, sentences
from declutr.evaluation.senteval.data.tasks import TASKS
from declutr.evaluation.senteval.runner.plan import ScoringChoice, ScoringUnit, StoredUnit, plan_units
from declutr.evaluation.senteval.runner.vectors import embed_all, parts_folder, time_left
from declutr.evaluation.senteval.scores.results import Protocol, Report, result_of
from declutr.evaluation.senteval.scores.scoring import Method, method_for, needs_fits, score
from declutr.evaluation.senteval.scores.similarity import collapse_warnings, sample_rows

_WORTH_IT = 5e6
"""Cost of fits above which Ray's start-up of some seconds pays off: half a minute or more on one thread."""

Take = Callable[[ScoringUnit], NDArray[np.float32]]


def score_unit(
    data: TaskData, method: Method, identity: str, embeddings: NDArray[np.float32], config: ClassifierConfig
) -> StoredUnit:
    """Score a unit; a task that cannot be fitted, such as own data with a class below the folds, gets a reason."""
    begun = time.monotonic()
    with _one_thread():
        try:
            scored = score(data, method, embeddings, config)
            scores, warnings, failed = dict(scored.scores), scored.warnings, ""
        except ValueError as error:
            scores, warnings, failed = {}, (), str(error)
    return StoredUnit(
        identity=identity,
        task=data.task.name,
        method=method,
        scores=scores,
        warnings=warnings,
        failed=failed,
        seconds=round(time.monotonic() - begun, 3),
    )


def score_units(
    units: Sequence[ScoringUnit], take: Take, config: ClassifierConfig, session: SessionConfig
) -> Iterator[tuple[ScoringUnit, StoredUnit]]:
    """Yield units, given longest first, with their results as they finish.

    `take` returns the embeddings `(N, D)` of a unit's sentences; it is called when the unit's turn comes. `session` has
    a cluster's address, or the number of CPUs to use on this machine; 1 scores everything in this process.
    """
    fits = [unit for unit in units if needs_fits(unit.data.task, unit.method)]
    spread = len(fits) > 1 and session.num_cpus != 1
    if spread and (session.address or sum(unit.cost for unit in fits) > _WORTH_IT):
        yield from _on_ray(units, take, config, session)
    else:
        for unit in units:
            yield unit, score_unit(unit.data, unit.method, unit.identity, take(unit), config)


def _on_ray(
    units: Sequence[ScoringUnit], take: Take, config: ClassifierConfig, session: SessionConfig
) -> Iterator[tuple[ScoringUnit, StoredUnit]]:
    """Run one Ray task per unit, at most CPUs + 1 at a time, so that not all embeddings must fit in memory at once."""
    start_ray(session.num_cpus, session.address)
    remote = ray.remote(num_cpus=1, max_retries=2)(score_unit)
    limit = int(ray.cluster_resources().get("CPU", 1)) + 1
    waiting = list(units)
    running: dict[ray.ObjectRef, ScoringUnit] = {}
    while waiting or running:
        while waiting and len(running) < limit:
            unit = waiting.pop(0)
            running[remote.remote(unit.data, unit.method, unit.identity, take(unit), config)] = unit
        done, _ = ray.wait(list(running), num_returns=1)
        for reference in done:
            yield running.pop(reference), ray.get(reference)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_CACHE = "embeddings"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

Units = Mapping[tuple[str, Method], StoredUnit]


@dataclass(frozen=True)
class Evaluated:
    """Results of one encoder."""

    encoder: str
    fingerprint: str
    size: int
    reports: Mapping[Protocol, Report]
    geometry: Mapping[str, float] = field(default_factory=dict)
    """Alignment and uniformity on STS-B; empty if not requested."""
    warnings: tuple[str, ...] = ()
    """Warnings about the encoder as a whole: collapsed, mostly zero."""
    seconds: float = 0.0
    """Summed scoring time of its units."""
    pretrained: str = ""
    """Name of the encoder it was trained from; "" if unknown."""


def evaluate(
    encoder: SentenceEncoder,
    inspections: Sequence[Inspection],
    choice: ScoringChoice,
    output: Path,
    session: SessionConfig,
    say: Callable[[str], None],
) -> Evaluated:
    """Score an encoder on all usable tasks, reusing the results in `output`.

    `output` takes `<encoder>-<fingerprint>/<task>.json` as units finish, and embeddings until the end. Those of a
    `CutEncoder` stay for the whole encoder, which is scored after it. `session` runs the classifiers, `say` receives
    progress lines.

    Raises:
        EncoderError: an embedding is not finite.
    """
    folder = output / f"{_UNSAFE.sub('_', encoder.name).strip('_')[-60:]}-{vectors_fingerprint(encoder)[:8]}"
    units = plan_units(inspections, choice, vectors_fingerprint(encoder), folder)
    there = {(unit.data.task.name, unit.method): stored for unit in units if (stored := unit.stored())}
    todo = [unit for unit in units if (unit.data.task.name, unit.method) not in there]
    warnings: tuple[str, ...] = _known_warnings(folder, vectors_fingerprint(encoder))
    if todo:
        if there:
            say(f"{encoder.name}: reusing {len(there)} of {len(units)} results from an earlier run")
        results, warnings = _score(encoder, units, todo, choice, output, session, say)
        there |= results
        write_json(folder / "encoder.json", {"fingerprint": vectors_fingerprint(encoder), "warnings": list(warnings)})
    shutil.rmtree(output / _CACHE / vectors_fingerprint(encoder)[:16], ignore_errors=True)
    geometry = there.get(("STSBenchmark", "geometry"))
    return Evaluated(
        encoder=encoder.name,
        fingerprint=vectors_fingerprint(encoder),
        size=encoder.size,
        reports={protocol: _report(encoder.name, protocol, inspections, there) for protocol in choice.protocols},
        geometry=dict(geometry.scores) if geometry else {},
        warnings=warnings,
        seconds=round(sum(unit.seconds for unit in there.values()), 3),
        pretrained=getattr(encoder, "pretrained", ""),
    )


def _score(
    encoder: SentenceEncoder,
    units: Sequence[ScoringUnit],
    todo: Sequence[ScoringUnit],
    choice: ScoringChoice,
    output: Path,
    session: SessionConfig,
    say: Callable[[str], None],
) -> tuple[dict[tuple[str, Method], StoredUnit], tuple[str, ...]]:
    """Embed the sentences of the units still to do and score these units."""
    rows = sentence_rows(unit.data for unit in units)  # those left by a killed call: of finished units, too
    whole, size = (encoder.whole, encoder.size) if isinstance(encoder, CutEncoder) else (encoder, None)
    if not parts_folder(output / _CACHE, vectors_fingerprint(whole), list(rows)).is_dir():
        rows = sentence_rows(unit.data for unit in todo)
    vectors = embed_all(whole, list(rows), output / _CACHE, say)
    warnings = collapse_warnings(vectors.take(sample_rows(len(rows)))[:, :size])
    for warning in warnings:
        say(f"{encoder.name}: WARNING: {warning}")

    def take(unit: ScoringUnit) -> np.ndarray:
        return vectors.take(np.array([rows[text] for text in sentences(unit.data)], np.int64))[:, :size]

    started, total, done = time.monotonic(), sum(unit.cost for unit in todo), 0.0
    results: dict[tuple[str, Method], StoredUnit] = {}
    for unit, stored in score_units(todo, take, choice.classifier, session):
        write_json(unit.path, stored.model_dump(mode="json"))
        results[unit.data.task.name, unit.method] = stored
        done += unit.cost
        more = time_left(started, done, total)
        outcome = f"no score: {stored.failed}" if stored.failed else f"{duration(stored.seconds)}"
        say(f"{encoder.name}: {len(results)}/{len(todo)} {unit.name} {outcome}{more}")
    return results, warnings


def _report(encoder: str, protocol: Protocol, inspections: Sequence[Inspection], units: Units) -> Report:
    results, missing = {}, {}
    for inspection in inspections:
        name = inspection.task.name
        method = method_for(inspection.task, protocol)
        if method is None:
            continue
        unit = units.get((name, method))
        if unit is None or unit.failed:
            missing[name] = unit.failed if unit else inspection.reason
        else:
            results[name] = result_of(inspection, protocol, unit.scores, *unit.warnings)
    for task in TASKS:
        if method_for(task, protocol) is not None and task.name not in results:
            missing.setdefault(task.name, "not asked for")
    return Report(encoder, protocol, results, missing)


def _known_warnings(folder: Path, fingerprint: str) -> tuple[str, ...]:
    path = folder / "encoder.json"
    if not path.is_file():
        return ()
    stored = read_json(path)
    return tuple(stored["warnings"]) if stored.get("fingerprint") == fingerprint else ()
