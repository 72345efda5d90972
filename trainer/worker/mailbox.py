"""Heartbeats and the stop notice of the workers of one host, in files, so that one of them asks Ray's head for all."""

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_FRESH_PERIODS = 2.0  # a worker that has not written for this many periods has ended or stands still
_OLD_SECONDS = 86_400.0  # folders of killed workers are removed after this time
_PREFIX = "declutr-workers-"
_STOP = "stop"


class Mailbox:
    """Files of the workers of one host. Every call may raise OSError.

    Args:
        name: the same for the workers of one start on one host, and for no others.
        rank: number of this worker.
        seconds: period in which each worker writes.
        folder: folder on the host; None: that of temporary files.
    """

    def __init__(self, name: str, rank: int, seconds: float, folder: Path | None = None) -> None:
        self._folder = (folder or Path(tempfile.gettempdir())) / f"{_PREFIX}{name}"
        self._rank, self._fresh_seconds = rank, _FRESH_PERIODS * seconds

    def write(self, heartbeat: dict[str, Any]) -> None:
        """Replaces this worker's heartbeat."""
        if not self._folder.is_dir():
            _remove_old(self._folder.parent)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        self._replace(str(self._rank), json.dumps(heartbeat))

    def leads(self) -> bool:
        """True if this worker asks the head: it has the lowest rank of those that still write."""
        now = time.time()
        return self._rank == min(
            rank for rank, at in self._written() if rank == self._rank or now - at < self._fresh_seconds
        )

    def heartbeats(self) -> list[dict[str, Any]]:
        """The newest heartbeat of every worker of this host."""
        return [json.loads((self._folder / str(rank)).read_bytes()) for rank, _ in self._written()]

    def pass_on(self, reason: str) -> None:
        """Tells the other workers of this host to save and stop."""
        self._replace(_STOP, reason)

    def stop_reason(self) -> str | None:
        """Reason for the workers to save and stop, or None."""
        path = self._folder / _STOP
        return path.read_text(encoding="utf-8") if path.exists() else None

    def leave(self) -> None:
        """Removes the folder unless another worker still writes to it."""
        now = time.time()
        if not any(rank != self._rank and now - at < self._fresh_seconds for rank, at in self._written()):
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            (self._folder / str(self._rank)).unlink(missing_ok=True)

    def _written(self) -> list[tuple[int, float]]:
        """Ranks and Unix times of their heartbeats."""
        with os.scandir(self._folder) as found:
            return [(int(one.name), one.stat().st_mtime) for one in found if one.name.isdigit()]

    def _replace(self, name: str, text: str) -> None:
        """Writes a file that is never seen in part; it need not survive the host, so nothing is forced to disk."""
        aside = self._folder / f".{name}.{self._rank}.{threading.get_ident()}"  # two threads may write at a time
        aside.write_text(text, encoding="utf-8")
        aside.replace(self._folder / name)


def _remove_old(parent: Path) -> None:
    """Removes folders of this user's earlier workers that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        status = folder.stat()
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _OLD_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
