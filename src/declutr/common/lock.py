"""Locks of a run or an output, in a folder or in an object store: one command at a time works there.

On the holder's host, the lock is held while the process exists, so kill -9 releases it; on another host, while its
heartbeat is recent by the clock of the storage. The check and the write exclude other commands: in a folder by flock.
In a store each command first writes an entry of its own and then lists all entries; of two commands at least one meets
the other's entry, and only a command that meets none goes on.

`filelock.SoftFileLease` (4.2.11) does less: a new command waits for a whole lease before it takes the lock of a host
that is gone, and on NFS, which cannot exchange two names, it never takes a stale lock.
"""

import contextlib
import fcntl
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import psutil

from declutr.common.console.logs import get_logger
from declutr.common.errors import DamagedError, RunLockedError
from declutr.common.storage import decode_record
from declutr.common.stores.folder import Folder
from declutr.common.watcher import Watcher

LOCK = "lock.json"
_STALE_SECONDS = 60.0  # six missed heartbeats of a store
_ENTRY = f".{LOCK}."
"""Start of the names of the entries of commands that are about to read and write the lock of a store."""
_ATTEMPTS = 8  # pauses of up to 0.1, 0.2 ... 12.8 s


class Holder(msgspec.Struct, frozen=True):
    """The command that holds a lock."""

    host: str
    pid: int
    began: str | None  # start time of the process, in clock ticks since its host booted
    processes: str  # Namespace of its pid
    since: str
    token: str  # random identifier of this command


class RunLock(Watcher):
    """Holds a folder, which must exist, while its block runs, with a heartbeat every `beat_seconds`.

    `lost` is called from a thread when another command took the lock, as this one was suspended for more than a minute.
    """

    _ADVICE = "wait for it, stop it, or name another folder"

    def __init__(self, run: Path | str, lost: Callable[[], None], beat_seconds: float = 5.0) -> None:
        super().__init__(beat_seconds, "declutr-lock")
        self._place, self._path, self._lost = str(run), Path(run, LOCK), lost
        self._holder = this_process(secrets.token_hex(8))

    def __enter__(self) -> Self:
        try:
            with self._alone():
                self._refuse()
                self._write()
        except (KeyboardInterrupt, SystemExit):  # a process that goes on, as a notebook does, must not hold the lock
            self._release()
            raise
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        try:
            self._release()
        except OSError as error:  # must not hide the reason why the run ended; without its process the lock is free
            get_logger().warning("the lock of %s could not be removed (%s)", self._place, error)

    def look(self) -> bool:
        """Renews the lock; False when it is lost."""
        try:
            if self._is_own():
                self._renew()
                return True
        except OSError as error:  # the storage does not answer: the next call may succeed
            get_logger().debug("the heartbeat of %s could not be written: %s", self._place, error)
            return True
        self._lost()
        return False

    def _refuse(self) -> None:
        """Refuses a holder that still runs, by its process on this host or its last heartbeat on another host.

        A heartbeat more than a minute ahead of the storage's clock is ignored, because a running holder would have
        renewed it.
        """
        if (holder := self._read()) is None:
            return
        if (holder.host, holder.processes) == (socket.gethostname(), _pid_namespace()):
            runs = holder.began is not None and holder.began == _began(holder.pid)
        else:
            runs = abs(self._age_seconds()) < _STALE_SECONDS
        if runs:
            who = f"host {holder.host}, pid {holder.pid}, since {holder.since}"
            raise RunLockedError(f"{self._place}: another command works here ({who}); {self._ADVICE}")

    def _is_own(self) -> bool:
        holder = self._read()
        return holder is not None and holder.token == self._holder.token

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        linked = False  # the file may be unlinked between opening and locking
        while not linked:
            with self._path.open("ab") as stream:  # closing it releases the flock
                fcntl.flock(stream, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):
                    linked = os.fstat(stream.fileno()).st_ino == self._path.stat().st_ino
                if linked:
                    yield

    def _read(self) -> Holder | None:
        with contextlib.suppress(FileNotFoundError):
            return _read_holder(self._path.read_bytes(), str(self._path))
        return None

    def _write(self) -> None:
        with self._path.open("wb") as stream:  # not a new file, whose inode nobody has locked
            stream.write(msgspec.json.encode(self._holder))
            stream.flush()
            os.fsync(stream.fileno())

    def _renew(self) -> None:
        os.utime(self._path)

    def _release(self) -> None:
        with self._alone():
            if self._is_own():
                self._path.unlink()

    def _age_seconds(self) -> float:
        """Seconds since the last heartbeat, by the clock of the storage that holds the lock."""
        clock = self._path.with_name(f".{LOCK}.{os.getpid()}.tmp")  # its time comes from the file system, not this host
        clock.touch()
        try:
            return clock.stat().st_mtime - self._path.stat().st_mtime
        finally:
            clock.unlink()


class StoreLock(RunLock):
    """As `RunLock`, of an address of an object store; a lock that cannot be renewed for a minute is lost, too."""

    _ADVICE = "wait until it ends (a minute if its host is gone), or name another address"

    def __init__(self, remote: Folder, lost: Callable[[], None], beat_seconds: float = 10.0) -> None:
        super().__init__(remote.url, lost, beat_seconds)
        self._remote, self._entry = remote, f"{_ENTRY}{self._holder.token}"

    def __enter__(self) -> Self:
        super().__enter__()
        self._remote = Folder(self._remote.url, retry_seconds=0.0)  # the next heartbeat is a retry
        return self

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            for attempt in range(_ATTEMPTS):
                # Stores list what was written before (S3 since 2020). A conditional write would take one request, and
                # Arrow's clients have none.
                self._remote.put(self._entry, b"{}")
                if not self._others_enter():
                    yield
                    return
                self._remote.delete(self._entry)
                time.sleep(random.uniform(0, 0.1 * 2**attempt))  # so that one of those that met comes back alone
            raise RunLockedError(f"{self._place}: several commands start here at the same time; run one of them again")
        finally:
            self._remote.delete(self._entry)

    def _others_enter(self) -> bool:
        """True if another command is entering. An entry of more than a minute was left by one that was killed."""
        now, entering = self._remote.modified(self._entry), False
        for name in self._remote.names():
            if name.startswith(_ENTRY) and name != self._entry and (at := self._remote.modified(name)) is not None:
                if now is not None and now - at > _STALE_SECONDS:
                    self._remote.delete(name)
                else:
                    entering = True
        return entering

    def _read(self) -> Holder | None:
        return _read_holder(self._remote.read(LOCK) or b"", self._remote.at(LOCK))

    def _write(self) -> None:
        self._remote.put(LOCK, msgspec.json.encode(msgspec.structs.asdict(self._holder) | {"beat": time.time()}))

    def _renew(self) -> None:
        self._write()

    def _release(self) -> None:
        if self._is_own():
            self._remote.delete(LOCK)

    def _age_seconds(self) -> float:
        now, renewed = self._remote.modified(self._entry), self._remote.modified(LOCK)
        return math.inf if now is None or renewed is None else now - renewed


def refuse_held(run: Path) -> None:
    """Refuses a run folder that a running command holds; takes no lock."""
    with contextlib.suppress(FileNotFoundError):  # it was released meanwhile
        RunLock(run, lambda: None)._refuse()


def _read_holder(raw: bytes, name: str) -> Holder | None:
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


def _began(pid: int) -> str | None:
    """Start time of a process of this host; None if no such process exists. Pids are reused, start times are not."""
    try:
        # behind the name of the program, which may hold spaces and parentheses
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        on_macos = not Path("/proc/self/stat").exists()
        return "running" if on_macos and psutil.pid_exists(pid) else None
    return None if state in "ZX" else fields[18]  # field 22 of proc(5); a zombie has ended


def _pid_namespace() -> str:
    """The boot and pid namespace of this process: others with this host name do not share its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
