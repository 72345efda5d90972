"""Recording of metrics, which only the first worker writes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.metrics.metrics import MetricsWriter, Window
from trainer.step.step import StepMetrics


class Records:
    """Writes lines of metrics on the first worker; the same calls do nothing on the others.

    Args:
        writer: writer of the first worker; None on the others.
    """

    def __init__(self, writer: MetricsWriter | None) -> None:
        self._writer = writer

    @staticmethod
    @contextlib.contextmanager
    def opened(run: Path, done: int, rank: int) -> Iterator["Records"]:
        """The records of a run while the block runs; lines of steps after `done` are dropped."""
        if rank:
            yield Records(None)
            return
        with contextlib.closing(MetricsWriter(run, done)) as writer:
            yield Records(writer)

    def start(self, step: int, parts: dict[str, float]) -> None:
        """Records the seconds of each part of the group's start."""
        if self._writer:
            self._writer.start(step, parts)

    def step(
        self,
        step: int,
        measured: StepMetrics,
        window: Window,
        documents: int,
        waited_seconds: float,
        peak_flops: float | None,
    ) -> dict[str, Any] | None:
        """Records a step with its rates; returns the line on the first worker.

        Args:
            step: 1-based optimizer step.
            measured: metrics of the step.
            window: timer of the step.
            documents: number of documents in the global batch.
            waited_seconds: time in seconds that this worker waited for data.
            peak_flops: FLOPs per second of all workers' devices together, or None.
        """
        if self._writer is None:
            return None
        return self._writer.step(step, measured, window.rates(measured, documents, waited_seconds, peak_flops))

    def scores(self, step: int, scores: dict[str, float]) -> None:
        """Records held-out scores of the weights after a step."""
        if self._writer:
            self._writer.scores(step, scores)

    def flush(self) -> None:
        """Writes all lines to the disk.

        Raises:
            OSError: writing failed; the lines are kept.
        """
        if self._writer:
            self._writer.flush()
