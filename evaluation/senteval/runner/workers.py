"""Units scored on processes of one thread each: here, or as Ray tasks on this machine or a cluster.

Steps of the classifiers are many and small. Two threads wait for each other at each of them; two processes do not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from common.session import SessionConfig, start_ray
from evaluation.senteval.classifier.settings import ClassifierConfig
from evaluation.senteval.data.taskdata import TaskData
from evaluation.senteval.runner.plan import StoredUnit, Unit
from evaluation.senteval.scores.scoring import Method, needs_fits, score

_WORTH_IT = 5e6
"""Cost of the fits, half a minute or more of one thread, from which on Ray's start of some seconds is worth it."""

Take = Callable[[Unit], NDArray[np.float32]]


def score_unit(
    data: TaskData, method: Method, identity: str, embeddings: NDArray[np.float32], config: ClassifierConfig
) -> StoredUnit:
    """A unit's file; a task that cannot be fitted (own data: a class smaller than the folds) says why instead."""
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
    units: Sequence[Unit], take: Take, config: ClassifierConfig, session: SessionConfig
) -> Iterator[tuple[Unit, StoredUnit]]:
    """Units with their results, as they finish.

    Args:
        units: the longest first.
        take: the embeddings `(N, D)` of a unit's sentences; called when its turn comes.
        config: of the classifiers.
        session: a cluster's address, or how many CPUs of this machine are used; 1: all is done in this process.
    """
    fits = [unit for unit in units if needs_fits(unit.data.task, unit.method)]
    spread = len(fits) > 1 and session.num_cpus != 1
    if spread and (session.address or sum(unit.cost for unit in fits) > _WORTH_IT):
        yield from _on_ray(units, take, config, session)
    else:
        for unit in units:
            yield unit, score_unit(unit.data, unit.method, unit.identity, take(unit), config)


def _on_ray(
    units: Sequence[Unit], take: Take, config: ClassifierConfig, session: SessionConfig
) -> Iterator[tuple[Unit, StoredUnit]]:
    """A task each, one more than there are CPUs at a time: embeddings of all tasks at once need not fit in memory."""
    start_ray(session.num_cpus, session.address)
    remote = ray.remote(num_cpus=1, max_retries=2)(score_unit)
    limit = int(ray.cluster_resources().get("CPU", 1)) + 1
    waiting = list(units)
    running: dict[ray.ObjectRef, Unit] = {}
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
