"""Progress of a preparation: a bar for users, and the same numbers as JSON lines for programs."""

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from declutr.common.config import Strict
from declutr.common.console.logs import bar
from declutr.common.watcher import Watcher
from declutr.pipeline.shards.content import ContentKind, bytes_noun, noun_of
from declutr.pipeline.shards.manifest import Counts, Sidecar

PROGRESS = "progress.jsonl"
HEARTBEATS = "heartbeats"
"""Folder in the output folder for the heartbeats of tasks; removed at the end of a stage."""
_MIB = 2**20
_BEAT_SECONDS = 2.0


class Done(Strict):
    """Finished work."""

    num_bytes: int = 0
    """Input bytes."""
    documents: int = 0
    kept: int = 0
    failed: int = 0
    text_bytes: int = 0

    @classmethod
    def of(cls, counts: Counts, num_bytes: int) -> "Done":
        """Work that gave these counts from this many input bytes."""
        failed = sum(counts.failed.values())
        return cls(
            num_bytes=num_bytes, documents=counts.read, kept=counts.kept, failed=failed, text_bytes=counts.text_bytes
        )

    def __add__(self, other: "Done") -> "Done":
        left, right = self.model_dump(), other.model_dump()
        return Done(**{name: left[name] + right[name] for name in left})


@dataclass
class UnitHeartbeat:
    """Writes the progress of one unit, at most every two seconds. A lost heartbeat does no harm."""

    folder: Path
    unit: str
    _last: float = 0.0

    def due(self) -> bool:
        """Returns True if the next heartbeat is due."""
        return time.monotonic() - self._last >= _BEAT_SECONDS

    def beat(self, done: Done) -> None:
        """Replaces this unit's last heartbeat."""
        self._last = time.monotonic()
        path = self.folder / HEARTBEATS / self.unit
        aside = path.with_name(f".{self.unit}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):  # a full disk ends the unit where it writes what matters
            path.parent.mkdir(exist_ok=True)
            aside.write_text(done.model_dump_json())
            aside.replace(path)


class Progress(Watcher):
    """Counts finished units and the heartbeats of unfinished ones; estimates the time left from input bytes.

    Args:
        folder: output folder; the JSON lines go to `progress.jsonl` in it.
        stage: name of the stage, for the bar and the lines.
        total_bytes: input bytes of all units.
        done: sidecars of units that were finished before this run.
        kind: kind of the rows, for the bar.
    """

    def __init__(self, folder: Path, stage: str, total_bytes: int, done: list[Sidecar], kind: ContentKind) -> None:
        super().__init__(_BEAT_SECONDS, "declutr-progress")
        self._folder, self._stage, self._total_bytes, self._kind = folder, stage, total_bytes, kind
        # Unbuffered, so that a line refused by a full disk is not retried at the end.
        self._log = (folder / PROGRESS).open("ab", buffering=0)
        self._finished = {sidecar.unit for sidecar in done}
        self._done = self._before = sum((Done.of(sidecar.counts, sidecar.num_bytes) for sidecar in done), Done())
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._bar = bar(
            total=total_bytes,
            initial=self._done.num_bytes,
            desc=stage,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} of input, {remaining} left{postfix}",
        )
        shutil.rmtree(folder / HEARTBEATS, ignore_errors=True)

    def add(self, sidecar: Sidecar) -> None:
        """Counts one more finished unit."""
        with self._lock:
            self._finished.add(sidecar.unit)
            self._done += Done.of(sidecar.counts, sidecar.num_bytes)
            self._show()

    def look(self) -> None:
        """Shows and logs the numbers of now."""
        with self._lock:
            self._show()

    def _show(self) -> None:
        now = self._done
        for path in (self._folder / HEARTBEATS).glob("[0-9]*"):
            if path.name not in self._finished:
                with contextlib.suppress(OSError, ValidationError):  # just replaced or removed
                    now += Done.model_validate_json(path.read_bytes())
        seconds = time.monotonic() - self._started
        rate = (now.num_bytes - self._before.num_bytes) / seconds
        line = {
            "stage": self._stage,
            "seconds": round(seconds, 3),
            "documents": now.documents,
            "kept_share": round(now.kept / max(1, now.documents), 4),
            "failed": now.failed,
            "text_mib_per_s": round((now.text_bytes - self._before.text_bytes) / _MIB / seconds, 3),
            "input_bytes": now.num_bytes,
            "total_input_bytes": self._total_bytes,
            "eta_seconds": round((self._total_bytes - now.num_bytes) / rate, 1) if rate > 0 else None,
        }
        with contextlib.suppress(OSError):
            self._log.write(json.dumps(line).encode() + b"\n")
        rows, content = noun_of(self._kind), bytes_noun(self._kind)
        text = f"{now.documents:,} {rows}, {line['kept_share']:.0%} kept, {line['text_mib_per_s']} MiB/s of {content}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(now.num_bytes - self._bar.n)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._bar.close()
        self._log.close()
        shutil.rmtree(self._folder / HEARTBEATS, ignore_errors=True)
