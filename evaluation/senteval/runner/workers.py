"""Scoring of units in single-threaded processes: in this process, or as Ray tasks on this machine or a cluster.

Classifier steps are many and small. Two threads wait for each other at every step; two processes do not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from declutr.common.cluster import SessionConfig
from declutr.common.session import start_ray
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.data.taskdata import TaskData
from declutr.evaluation.senteval.runner.plan import ScoringUnit, StoredUnit
from declutr.evaluation.senteval.scores.scoring import Method, needs_fits, score

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
            found = score(data, method, embeddings, config)
            scores, warnings, failed = dict(found.scores), found.warnings, ""
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
