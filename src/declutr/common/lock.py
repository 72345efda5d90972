"""Lock of a run or output folder: one command at a time holds it, and kill -9 of the holder releases it.

On the holder's host, the lock is held while the process exists; on another host, while its heartbeat is recent. The
check and the write happen under flock, so of two simultaneous commands one is refused.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self, TextIO

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.storage import DamagedError, decode_record
from declutr.common.watcher import Watcher

LOCK = "lock.json"
_BEAT_SECONDS = 5.0
_STALE_SECONDS = 60.0


class RunLockedError(RuntimeError):
    """Another command holds this folder."""


class Holder(msgspec.Struct, frozen=True):
    """The command that holds a lock."""

    host: str
    pid: int
    began: str | None
    """Start time of the process, in clock ticks since its host booted."""
    processes: str
    """Namespace of its pid."""
    since: str
    token: str
    """Random identifier of this command."""


class RunLock(Watcher):
    """Holds a run folder while its block runs.

    Args:
        run: the folder; it must exist.
        lost: called from a thread when another command has taken over the lock because this process was suspended for
            more than a minute.
        beat_seconds: time between two heartbeats.

    Raises:
        RunLockedError: on entering, if a running command holds the lock.
    """

    def __init__(self, run: Path, lost: Callable[[], None], beat_seconds: float = _BEAT_SECONDS) -> None:
        super().__init__(beat_seconds, "declutr-lock")
        self._path, self._lost = run / LOCK, lost
        self._token = secrets.token_hex(8)

    def __enter__(self) -> Self:
        with _open_locked(self._path) as stream:
            _refuse(self._path, stream.buffer)
            self._write(stream)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        try:
            with _open_locked(self._path) as stream:
                holder = self._read(stream)
                if holder is not None and holder.token == self._token:
                    self._path.unlink()
        except OSError as error:  # must not hide the reason why the run ended; without its process the lock is free
            get_logger().warning("the lock %s could not be removed (%s)", self._path, error.strerror)

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
            get_logger().debug("the heartbeat of %s could not be written: %s", self._path, error.strerror)
            return True
        self._lost()
        return False


def refuse_held(run: Path) -> None:
    """Refuses a run folder that a running command holds; takes no lock.

    Raises:
        RunLockedError: as `RunLock`.
    """
    with contextlib.suppress(FileNotFoundError), (run / LOCK).open("rb") as stream:
        _refuse(run / LOCK, stream)


def _refuse(path: Path, stream: BinaryIO) -> None:
    stream.seek(0)
    holder = read_holder(stream.read(), str(path))
    if holder is not None and is_alive(holder, lambda: _age_seconds(path)):
        raise RunLockedError(f"{refusal(path.parent, holder)}; wait for it, stop it, or name another folder")


def _open_locked(path: Path) -> TextIO:
    """Opens the file under flock, creating it if necessary; closing it releases the flock."""
    while True:
        stream = path.open("a+", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            if os.fstat(stream.fileno()).st_ino == path.stat().st_ino:
                return stream
        except FileNotFoundError:
            pass
        stream.close()  # it was released and unlinked between the two calls


def read_holder(raw: bytes, name: str) -> Holder | None:
    """The holder of a lock; None if the lock is new, was cut off by a kill, or is damaged, which is logged."""
    if not raw:
        return None
    try:
        return decode_record(raw, Holder, name)
    except DamagedError as error:
        get_logger().warning("%s; the lock counts as free", error)
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
    """An error message that names the holder of a run or of an output folder."""
    return f"{run}: another command works here (host {holder.host}, pid {holder.pid}, since {holder.since})"


def is_alive(holder: Holder, age_seconds: Callable[[], float]) -> bool:
    """Returns True if the holder still runs, by its process on this host or its last heartbeat on another host.

    `age_seconds` returns the age of the last heartbeat by the clock of the storage that holds the lock. A heartbeat
    more than a minute ahead of that clock is ignored, because a running holder would have renewed it.
    """
    if (holder.host, holder.processes) == (socket.gethostname(), _pid_namespace()):
        began = _began(holder.pid)
        return began is not None and began == holder.began
    return abs(age_seconds()) < _STALE_SECONDS


def _age_seconds(path: Path) -> float:
    """Seconds since the file was touched, by the clock of its file system."""
    clock = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # its time comes from the file system, not from this host
    clock.touch()
    try:
        return clock.stat().st_mtime - path.stat().st_mtime
    finally:
        clock.unlink()


def _began(pid: int) -> str | None:
    """Start time of a process of this host; None if no such process exists. Pids are reused, start times are not."""
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
    """The boot and pid namespace of this process: others with this host name do not share its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
