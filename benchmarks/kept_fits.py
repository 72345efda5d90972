"""Fits of the released classifiers kept on disk, so that a run of hours can resume after an interruption.

The released code reseeds the global generators for every classifier, so no fit depends on an earlier one, and a fit
from disk changes nothing that follows. Its seconds are stored with it.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import record
from common.storage import write_aside


class KeptFits:
    """Fits of one task with one encoder, in the order in which they are made.

    Args:
        folder: folder for these fits alone; created if missing.

    Attributes:
        elapsed: wall seconds and processor seconds of the fits that were read from disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.elapsed = np.zeros(2)
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def around(self, classifier: type) -> Iterator[None]:
        """Make `classifier.fit` store its final weights and its answer, within this block."""
        fit, numbers = classifier.fit, itertools.count()  # type: ignore[attr-defined]

        def kept(own: Any, *arguments: Any, **options: Any) -> float:
            path = self.folder / f"{next(numbers):05d}.safetensors"
            return self._taken(path, own) if path.is_file() else _made(path, own, fit, *arguments, **options)

        classifier.fit = kept  # type: ignore[attr-defined]
        try:
            yield
        finally:
            classifier.fit = fit  # type: ignore[attr-defined]

    def _taken(self, path: Path, own: Any) -> float:
        with safe_open(path, "pt") as stored:
            facts = stored.metadata()
            own.model.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
        self.elapsed += [float(facts["seconds"]), float(facts["cpu_seconds"])]
        return float(facts["accuracy"])


def _made(path: Path, own: Any, fit: Callable[..., float], *arguments: Any, **options: Any) -> float:
    begun = record.now()
    accuracy = fit(own, *arguments, **options)
    seconds, cpu_seconds = record.now() - begun
    facts = {"accuracy": accuracy, "seconds": seconds, "cpu_seconds": cpu_seconds}
    with write_aside(path) as aside:
        save_file(own.model.state_dict(), aside, {name: repr(float(value)) for name, value in facts.items()})
    return accuracy
