"""Weights & Biases as a logger: a process that gets the lines of metrics through a pipe."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.storage import DamagedError, hash_json, read_record, write_json
from declutr.trainer.metrics import wandb_process
from declutr.trainer.metrics.config import WandbConfig

WANDB_ID = "wandb.json"
"""The file of a run with the id of its W&B run."""
_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CREDENTIALS_FILE")
_MOST_BYTES = 2**24  # of lines that wait for a slow process
_UPLOAD_SECONDS, _END_SECONDS = 8.0, 12.0  # for the last lines, and for the process after them


class _Stored(msgspec.Struct, frozen=True):
    """The content of `wandb.json`."""

    id: str


def missing_package(mode: str) -> str | None:
    """The problem of a run that logs to W&B in this mode without the package; None if there is none."""
    found = find_spec("wandb")
    if found is not None and found.origin is not None:  # a folder `wandb` of files here is no package
        return None
    return f"metrics.wandb.mode = {mode}: {wandb_process.MISSING}, or set it to disabled"


def run_id(folder: Path, facts: Mapping[str, str]) -> str:
    """Id of the W&B run of a run: the stored one, so that a moved run keeps it; else a hash of `facts`, then stored.

    Args:
        folder: folder of the run.
        facts: what tells this run from any other: its place, host, settings and data.
    """
    path = folder / WANDB_ID
    try:
        return read_record(path, _Stored).id
    except FileNotFoundError:
        pass
    except DamagedError as error:
        get_logger().warning("%s: writing it again", error)
    found = hash_json(dict(facts))[:16]
    write_json(path, {"id": found})
    return found


class WandbLogger:
    """Passes lines to its own process (`wandb_process.py`), and never waits for it before the end.

    Args:
        config: settings of W&B.
        folder: folder of the run, in which W&B makes the folder `wandb`.
        facts: as for `run_id`.
        settings: settings of the run, which W&B shows.

    Raises:
        OSError: the process cannot be started.

    Attributes:
        process: the process.
    """

    def __init__(self, config: WandbConfig, folder: Path, facts: Mapping[str, str], settings: dict[str, Any]) -> None:
        server = {} if config.base_url is None else {"base_url": config.base_url}
        arguments = {
            "mode": config.mode,
            "project": config.project,
            "entity": config.entity,
            "id": run_id(folder, facts),
            "name": folder.name,
            "dir": str(folder),
            "config": settings,
            "settings": {"finish_timeout": _UPLOAD_SECONDS, **server},
        }
        self._waiting = bytearray(json.dumps(arguments).encode() + b"\n")
        self._lock = threading.Lock()
        self._secrets = {name: os.environ[name] for name in _CREDENTIALS if os.environ.get(name)}
        # Settings alone decide what is sent, and where; reports of errors would go to W&B from an offline run too.
        others = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read until the process ends
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", wandb_process.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            cwd=folder,  # a folder with settings of W&B elsewhere has no effect
            env=others | self._secrets | {"WANDB_ERROR_REPORTING": "false"},
            start_new_session=True,  # Ctrl-C must not end it before the training
        )
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of metrics."""
        with self._lock:
            self._waiting += json.dumps(line).encode() + b"\n"

    def flush(self, to_disk: bool = False) -> None:
        """Passes as many lines to the process as it takes now.

        Raises:
            OSError: the process has ended, or takes no lines.
        """
        del to_disk
        with self._lock:
            try:
                while self._waiting:
                    del self._waiting[: os.write(self._pipe, self._waiting[: 2**16])]
            except BlockingIOError:
                if len(self._waiting) > _MOST_BYTES:
                    raise OSError(errno.EAGAIN, f"its process {self.process.pid} takes no more lines") from None
            except BrokenPipeError:
                raise OSError(errno.EPIPE, self._reason()) from None

    def close(self) -> None:
        """Ends the process after it took and sent the last lines; kills it if that takes too long.

        Raises:
            OSError: the process failed, or was killed.
        """
        until = time.monotonic() + _END_SECONDS
        status: int | None = None
        try:
            while self._waiting and time.monotonic() < until:
                self.flush()
                time.sleep(0.02)
        finally:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                status = self.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if status is None or self._waiting:
            raise OSError(errno.ETIMEDOUT, f"its process did not end within {_END_SECONDS:g} s")
        if status:
            raise OSError(errno.EPIPE, self._reason())

    def _reason(self) -> str:
        """The last line of the process's errors, without secrets."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process {self.process.pid} has ended"
        for secret in self._secrets.values():
            reason = reason.replace(secret, "***")
        return reason
