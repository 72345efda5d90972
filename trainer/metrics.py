"""Numbers of a run: JSON lines and TensorBoard, written by rank 0, exact again after a resume."""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from common.storage import write_text
from trainer.step import StepMetrics

METRICS = "metrics.jsonl"


@dataclass
class Window:
    """One step's time and what it went to.

    Attributes:
        began: monotonic time of its beginning, in seconds.
    """

    began: float = field(default_factory=time.monotonic)

    def rates(
        self, measured: StepMetrics, documents: int, waited_seconds: float, peak_flops: float | None
    ) -> dict[str, float | None]:
        """Tokens and documents a second, share of time spent waiting for data, utilisation, peak memory.

        Args:
            measured: of the step.
            documents: of the step, over all workers.
            waited_seconds: this worker spent waiting for data.
            peak_flops: of all workers' devices together; None where it is not known.
        """
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "seconds": seconds,
            "tokens_per_second": measured.num_tokens / seconds,
            "documents_per_second": documents / seconds,
            "data_wait_share": waited_seconds / seconds,
            "mfu": None if peak_flops is None else measured.flops / seconds / peak_flops,
            "peak_memory_mib": peak_memory_mib(),
        }


def peak_memory_mib() -> float:
    """Most memory that was in use so far, in MiB: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


class MetricsWriter:
    """Appends a line a step to `metrics.jsonl` and the same to TensorBoard.

    Args:
        folder: the run.
        after_step: lines of later steps are dropped first: they belong to steps that are about to be taken again.
    """

    def __init__(self, folder: Path, after_step: int) -> None:
        self.path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] <= after_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._stream = self.path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    def step(self, step: int, metrics: StepMetrics, extra: dict[str, float | None]) -> None:
        """Writes the numbers of a step."""
        self._write({"kind": "step", "step": step, **asdict(metrics), **extra})

    def scores(self, step: int, scores: dict[str, float]) -> None:
        """Writes held-out scores of the weights after a step."""
        self._write({"kind": "validation", "step": step, **scores})

    def _write(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps({**line, "time": round(time.time(), 3)}) + "\n")
        self._stream.flush()
        for name, value in line.items():
            if name not in ("kind", "step", "batch_digest") and value is not None:
                self._board.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def close(self) -> None:
        """Closes both files."""
        self._stream.close()
        self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics; a last line cut off by a kill is left out."""
    path = folder / METRICS
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def read_last_step(path: Path, tail_bytes: int = 8192) -> dict[str, Any] | None:
    """The newest step's line, read from the end of the file; None before the first."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - tail_bytes))
        lines = stream.read().split(b"\n")
    # the first piece may begin inside a line, the last is empty or not yet whole
    for raw in reversed(lines[1:-1] if len(lines) > 2 else lines[:-1]):
        line: dict[str, Any] = json.loads(raw)
        if line["kind"] == "step":
            return line
    return None
