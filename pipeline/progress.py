"""How far a preparation is: a bar for people, the same numbers as JSON lines for programs."""

import json
import sys
import time
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from pipeline.manifest import Sidecar, sum_counts

PROGRESS = "progress.jsonl"
_MIB = 2**20


class Progress:
    """Counts finished units; time left is estimated from input bytes.

    Args:
        folder: output folder; the JSON lines go to `progress.jsonl` in it.
        stage: what is being done, for the bar and the lines.
        total_bytes: input bytes of all units.
        done: units that were finished before this run.
    """

    def __init__(self, folder: Path, stage: str, total_bytes: int, done: list[Sidecar]) -> None:
        self._log = (folder / PROGRESS).open("a", encoding="utf-8")
        self._stage = stage
        self._total_bytes = total_bytes
        self._counts = sum_counts([sidecar.counts for sidecar in done])
        self._bytes = self._bytes_before = sum(sidecar.num_bytes for sidecar in done)
        self._text_before = self._counts.text_bytes
        self._started = time.monotonic()
        self._bar = tqdm(
            total=total_bytes,
            initial=self._bytes,
            desc=stage,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} of input, {remaining} left{postfix}",
        )

    def add(self, sidecar: Sidecar) -> None:
        """One more unit is finished."""
        self._counts = sum_counts([self._counts, sidecar.counts])
        self._bytes += sidecar.num_bytes
        seconds = time.monotonic() - self._started
        rate = (self._bytes - self._bytes_before) / seconds
        line = {
            "stage": self._stage,
            "seconds": round(seconds, 3),
            "documents": self._counts.read,
            "kept_share": round(self._counts.kept / max(1, self._counts.read), 4),
            "failed": sum(self._counts.failed.values()),
            "text_mib_per_s": round((self._counts.text_bytes - self._text_before) / _MIB / seconds, 3),
            "input_bytes": self._bytes,
            "total_input_bytes": self._total_bytes,
            "eta_seconds": round((self._total_bytes - self._bytes) / rate, 1) if rate > 0 else None,
        }
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        self._bar.set_postfix_str(
            f"{self._counts.read:,} documents, {self._counts.kept / max(1, self._counts.read):.0%} kept, "
            f"{line['text_mib_per_s']} MiB/s of text",
            refresh=False,
        )
        self._bar.update(sidecar.num_bytes)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._log.close()
