"""Fits of the released classifiers kept on disk, so that a run of hours can resume after an interruption.

The released code reseeds the global generators for every classifier, so no fit depends on an earlier one, and a fit
from disk changes nothing that follows. Its seconds are stored with it.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from common.storage import write_aside


class KeptFits:
    """Fits of one task with one encoder, in the order in which they are made.

    Args:
        folder: folder for these fits alone; created if missing.

    Attributes:
        seconds: wall time of the fits that were read from disk.
        cpu_seconds: processor time of these fits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = self.cpu_seconds = 0.0
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
        self.seconds += float(facts["seconds"])
        self.cpu_seconds += float(facts["cpu_seconds"])
        return float(facts["accuracy"])


def _made(path: Path, own: Any, fit: Callable[..., float], *arguments: Any, **options: Any) -> float:
    begun, cpu_begun = time.perf_counter(), time.process_time()
    accuracy = fit(own, *arguments, **options)
    facts = {
        "accuracy": accuracy,
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu_begun,
    }
    with write_aside(path) as aside:
        save_file(own.model.state_dict(), aside, {name: repr(float(value)) for name, value in facts.items()})
    return accuracy
