"""Every process that came of us, also those whose parents have died; and nobody else's."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.watcher import Watcher

_EVERY_SECONDS = 1.0


@dataclass(frozen=True)
class Process:
    """A process that was seen alive.

    Attributes:
        pid: its number.
        began: its start in clock ticks since boot; with the number it names one process for ever.
        parent: the number of the process that started it.
        state: one letter: Z is a zombie.
    """

    pid: int
    began: int
    parent: int
    state: str

    @property
    def title(self) -> str:
        """Its command line, or the title it gave itself; empty when it is gone."""
        try:
            raw = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def running() -> dict[int, Process]:
    """Everything that runs on this machine, by number, without titles."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - hundreds of entries, once a second
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:  # noqa: PTH123 - likewise
                fields = stream.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(name)] = Process(int(name), int(fields[19]), int(fields[1]), fields[0].decode())
    return found


class Census(Watcher):
    """Watches which processes descend from this one, in a thread, while its block runs."""

    def __init__(self) -> None:
        super().__init__(_EVERY_SECONDS, "census")
        self._known: dict[tuple[int, int], Process] = {}
        self._lock = threading.Lock()

    @contextmanager
    def nothing_outlives(self) -> Iterator[None]:
        """Whatever of ours still lives after the block, also after an error in it, is ended."""
        try:
            yield
        finally:
            while left := self.alive():  # some are started while others end
                self.end(left)
                time.sleep(0.2)

    def look(self) -> None:
        """Notes the processes of now."""
        self.alive()

    def alive(self) -> list[Process]:
        """Ours that live now: zombies are dead."""
        table = running()
        with self._lock:
            ours = {process.pid for process in table.values() if (process.pid, process.began) in self._known}
            ours.add(os.getpid())
            children: dict[int, list[Process]] = {}
            for process in table.values():
                children.setdefault(process.parent, []).append(process)
            todo = list(ours)
            while todo:
                for child in children.get(todo.pop(), []):
                    if child.pid not in ours:
                        ours.add(child.pid)
                        todo.append(child.pid)
            living = [table[pid] for pid in ours if pid in table and pid != os.getpid()]
            living = [process for process in living if process.state not in "ZX"]
            self._known.update({(process.pid, process.began): process for process in living})
        return sorted(living, key=lambda process: process.pid)

    def titled(self, part: str) -> list[Process]:
        """Ours that live and have this in their title."""
        return [process for process in self.alive() if part in process.title]

    def wait_gone(self, seconds: float) -> list[Process]:
        """Waits until none of ours lives; those that still do."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def end(self, left: list[Process]) -> None:
        """Kills processes of ours; stopped ones too."""
        for process in left:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
