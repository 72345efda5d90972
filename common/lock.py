"""One command a run folder: a lock with the holder's place and a heartbeat, which a kill -9 does not leave locked.

On the holder's own host the process itself is asked for; from another host the heartbeat decides. The check and the
write happen under flock, so of two commands at the same moment one is refused.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from common.logs import get_logger

LOCK = "lock.json"
_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0


class RunLockedError(RuntimeError):
    """Another command works on this run folder."""


class RunLock:
    """Holds a run folder while its block runs.

    Args:
        run: the folder; it must exist.
        lost: called, from a thread, when another command took the lock over because this process had been stopped for
            longer than a minute.
        beat_seconds: between two signs of life.

    Raises:
        RunLockedError: on entering, when a living command holds it.
    """

    def __init__(self, run: Path, lost: Callable[[], None], beat_seconds: float = _BEAT_SECONDS) -> None:
        self._path = run / LOCK
        self._lost, self._beat_seconds = lost, beat_seconds
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="declutr-lock")

    def __enter__(self) -> "RunLock":
        with _open_locked(self._path) as stream:
            holder = _read(stream)
            if holder is not None and lives(holder, lambda: _age_seconds(self._path)):
                raise RunLockedError(
                    f"{refusal(self._path.parent, holder)}; wait for it, stop it, or name another folder"
                )
            self._write(stream)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            with _open_locked(self._path) as stream:
                holder = _read(stream)
                if holder is not None and holder["token"] == self._token:
                    self._path.unlink()
        except OSError as error:  # why the run ended is what must be said; on this host it is nobody's in a moment
            get_logger().warning("%s cannot be taken away (%s)", self._path, error.strerror)

    def _write(self, stream: TextIO) -> None:
        stream.seek(0)
        stream.truncate()
        json.dump(this_process(self._token), stream)
        stream.flush()
        os.fsync(stream.fileno())

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            try:
                with self._path.open() as stream:
                    holder = _read(stream)
                if holder is None or holder["token"] != self._token:
                    self._lost()
                    return
                os.utime(self._path)
            except FileNotFoundError:
                self._lost()
                return
            except OSError as error:  # a storage that is away: the next one may get through
                get_logger().debug("%s cannot be renewed: %s", self._path, error.strerror)


def _open_locked(path: Path) -> TextIO:
    """The file at the path, made if it is missing, under flock; closing it lets go."""
    while True:
        stream = path.open("a+", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            if os.fstat(stream.fileno()).st_ino == path.stat().st_ino:
                return stream
        except FileNotFoundError:
            pass
        stream.close()  # it was let go, and unlinked, between the two calls


def _read(stream: TextIO) -> dict[str, Any] | None:
    stream.seek(0)
    try:
        holder: dict[str, Any] = json.loads(stream.read())
    except ValueError:  # new, or cut off by a kill
        return None
    return holder


def this_process(token: str) -> dict[str, Any]:
    """What a lock says of its holder."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "processes": _pid_namespace(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "token": token,
    }


def refusal(run: str | Path, holder: dict[str, Any]) -> str:
    """Who holds a run, in words."""
    who = f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    return f"{run}: another command works on this run ({who})"


def lives(holder: dict[str, Any], age_seconds: Callable[[], float]) -> bool:
    """Does the holder still run? On another host: was its last sign of life, of this age, a short while ago?"""
    if (holder["host"], holder["processes"]) == (socket.gethostname(), _pid_namespace()):
        began = _began(holder["pid"])
        return began is not None and began == str(holder["began"])
    return age_seconds() < _STALE_SECONDS


def _age_seconds(path: Path) -> float:
    """Since the file was touched."""
    clock = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # the file system's clock, not ours
    clock.touch()
    try:
        return clock.stat().st_mtime - path.stat().st_mtime
    finally:
        clock.unlink()


def _began(pid: int) -> str | None:
    """When a process of this host began; None where there is none. Pids are used again, times are not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except ProcessLookupError:
        return None
    else:
        state, *fields = stat.rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    try:  # no /proc: macOS
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"


def _pid_namespace() -> str:
    """Two containers may have the same name and not see each other's processes."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
