"""One command a run folder: a lock with the holder's place and a heartbeat, which a kill -9 does not leave locked.

On the holder's own host the process itself is asked for; from another host the heartbeat decides. The check and the
write happen under flock, so of two commands at the same moment one is refused.
"""

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, TextIO

import msgspec

from common.console.logs import get_logger
from common.records import DamagedError, decode_record
from common.watcher import Watcher

LOCK = "lock.json"
_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0


class RunLockedError(RuntimeError):
    """Another command works in this folder."""


class Holder(msgspec.Struct, frozen=True):
    """The command that holds a run, as a lock names it."""

    host: str
    pid: int
    began: str | None
    """When the process began, in the words of its host."""
    processes: str
    """The namespace of its pid."""
    since: str
    token: str
    """Of this one command."""


class RunLock(Watcher):
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
        super().__init__(beat_seconds, "declutr-lock")
        self._path, self._lost = run / LOCK, lost
        self._token = secrets.token_hex(8)

    def __enter__(self) -> Self:
        with _open_locked(self._path) as stream:
            holder = self._read(stream)
            if holder is not None and lives(holder, lambda: _age_seconds(self._path)):
                raise RunLockedError(
                    f"{refusal(self._path.parent, holder)}; wait for it, stop it, or name another folder"
                )
            self._write(stream)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        try:
            with _open_locked(self._path) as stream:
                holder = self._read(stream)
                if holder is not None and holder.token == self._token:
                    self._path.unlink()
        except OSError as error:  # why the run ended is what must be said; on this host it is nobody's in a moment
            get_logger().warning("%s cannot be taken away (%s)", self._path, error.strerror)

    def _write(self, stream: TextIO) -> None:
        stream.seek(0)
        stream.truncate()
        stream.write(msgspec.json.encode(this_process(self._token)).decode())
        stream.flush()
        os.fsync(stream.fileno())

    def _read(self, stream: TextIO) -> Holder | None:
        stream.seek(0)
        return read_holder(stream.buffer.read(), str(self._path))

    def look(self) -> bool:
        """Renews the lock; False when it is lost."""
        try:
            with self._path.open() as stream:
                holder = self._read(stream)
            if holder is not None and holder.token == self._token:
                os.utime(self._path)
                return True
        except FileNotFoundError:
            pass
        except OSError as error:  # the storage does not answer: the next call may succeed
            get_logger().debug("%s cannot be renewed: %s", self._path, error.strerror)
            return True
        self._lost()
        return False


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


def read_holder(raw: bytes, name: str) -> Holder | None:
    """The holder that a lock names; None: the lock is new, cut off by a kill, or damaged, and so nobody's.

    Args:
        raw: content of the lock.
        name: of the lock, for the log.
    """
    if not raw:
        return None
    try:
        return decode_record(raw, Holder, name)
    except DamagedError as error:
        get_logger().warning("%s; it counts as nobody's", error)
        return None


def this_process(token: str) -> Holder:
    """This process as a holder."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_began(os.getpid()),
        processes=_pid_namespace(),
        since=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        token=token,
    )


def refusal(run: str | Path, holder: Holder) -> str:
    """A sentence that names the holder of a run or of an output folder."""
    return f"{run}: another command works here (host {holder.host}, pid {holder.pid}, since {holder.since})"


def lives(holder: Holder, age_seconds: Callable[[], float]) -> bool:
    """Whether the holder still runs: its process on this host, its last sign of life on another.

    Args:
        holder: as its lock names it.
        age_seconds: of the last sign of life, on the clock of the storage that holds the lock. A date that is more than
            a minute ahead of that clock is no sign of life either: a living holder would have renewed it.
    """
    if (holder.host, holder.processes) == (socket.gethostname(), _pid_namespace()):
        began = _began(holder.pid)
        return began is not None and began == holder.began
    return abs(age_seconds()) < _STALE_SECONDS


def _age_seconds(path: Path) -> float:
    """Seconds since the file was touched."""
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
