"""Census of all processes that descend from this one, also of those whose parents have died."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from declutr.common.watcher import Watcher

_EVERY_SECONDS = 1.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """Living processes with these ids and all their descendants, without zombies."""
    everyone = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    children = defaultdict(list)
    for pid, process in everyone.items():
        children[process.info["ppid"]].append(pid)
    found: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += [child for child in children[pid] if child not in found]
    return {everyone[pid] for pid in found & everyone.keys() if everyone[pid].info["status"] not in _ENDED}


class Census(Watcher):
    """Thread that tracks the descendants of this process while its block runs."""

    def __init__(self) -> None:
        super().__init__(_EVERY_SECONDS, "census")
        self._known: set[psutil.Process] = set()
        self._lock = threading.Lock()

    @contextmanager
    def nothing_outlives(self) -> Iterator[None]:
        """Kill all our processes that are still alive after the block, also after an error in it."""
        try:
            yield
        finally:
            while left := self.alive():  # some are started while others end
                self.end(left)
                time.sleep(0.2)

    def look(self) -> None:
        """Notes the processes of now."""
        self.alive()

    def alive(self) -> list[psutil.Process]:
        """Our living processes, without zombies."""
        with self._lock:
            known = [process.pid for process in self._known if process.is_running()]
            self._known = family([os.getpid(), *known]) - {psutil.Process()}
            return sorted(self._known, key=lambda process: process.pid)

    def titled(self, part: str) -> list[psutil.Process]:
        """Our living processes with this text in their title."""
        return [process for process in self.alive() if part in title(process)]

    def wait_gone(self, seconds: float) -> list[psutil.Process]:
        """Wait until all our processes have ended; return those still alive at the timeout."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def end(self, left: Iterable[psutil.Process]) -> None:
        """Kill our processes, stopped ones too."""
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def title(process: psutil.Process) -> str:
    """Command line, or the title that the process gave itself; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip()
    return ""
