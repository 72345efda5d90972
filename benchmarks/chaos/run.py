"""A run as its user sees it (the command in a process, its output, its folder), and a census of our processes."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import yaml

from declutr.common.watcher import Watcher
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.metrics.metrics import METRICS, read_last_step, read_metrics

ROOT = Path(__file__).resolve().parents[2]
ATTACHED = Path(__file__).with_name("attached")
_POLL_SECONDS = 0.02
_CENSUS_SECONDS = 1.0
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_BAR = re.compile(r"^train:\s.*?(?=\d\d:\d\d:\d\d \S+ [A-Z]+ |$)")  # the progress bar, up to a log line after it


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """Living processes with these ids and all their descendants, without zombies."""
    everyone = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    children = defaultdict(list)
    for pid, process in everyone.items():
        children[process.info["ppid"]].append(pid)
    members: set[int] = set()
    todo = list(pids)
    while todo:
        pid = todo.pop()
        members.add(pid)
        todo += [child for child in children[pid] if child not in members]
    # a known one may have ended meanwhile
    return {everyone[pid] for pid in members & everyone.keys() if everyone[pid].info["status"] not in _ENDED}


class Census(Watcher):
    """Thread that tracks the descendants of this process while its block runs."""

    def __init__(self) -> None:
        super().__init__(_CENSUS_SECONDS, "census")
        self._processes: set[psutil.Process] = set()
        self._lock = threading.Lock()

    def __exit__(self, *reason: object) -> None:
        while left := self.alive():  # nothing outlives the block; some processes are started while others end
            self.end(left)
            time.sleep(0.2)
        super().__exit__(*reason)

    def look(self) -> None:
        """Notes the processes of now."""
        self.alive()

    def alive(self) -> list[psutil.Process]:
        """Our living processes, without zombies."""
        with self._lock:
            # the kernel may have given its pid to another program
            pids = [process.pid for process in self._processes if process.is_running()]
            # known ones too: an orphan is no descendant any more
            self._processes = family([os.getpid(), *pids]) - {psutil.Process()}
            return sorted(self._processes, key=lambda process: process.pid)

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


class ChaosError(RuntimeError):
    """An event did not happen in time, or the command ended too early."""


@dataclass(frozen=True)
class Snapshot:
    """Moment of a run, for comparisons."""

    seconds: float  # wall clock
    characters: int  # length of the command's output so far
    inode: int | None  # inode of the metrics file
    lines: dict[int, dict[str, Any]]  # metrics lines of the steps so far

    @property
    def step(self) -> int:
        """The last step so far."""
        return max(self.lines, default=0)


@dataclass
class Run:
    """One run and the command that trains it, started as often as its user starts it."""

    place: Path  # folder of the configuration, the output and the run
    values: dict[str, Any]  # the `train` section
    census: Census  # census of all our processes
    environment: dict[str, str]  # environment of the command
    patience: float  # factor of every timeout, for busy machines
    nodes: Any = None  # nodes of the cluster it runs on, if this benchmark made it
    starts: int = 0  # number of starts of the command
    ended: float = 0.0  # wall clock time at which its end was seen
    driver: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _ranks: dict[int, int] = field(default_factory=dict, repr=False)
    _metrics: dict[int, BinaryIO] = field(default_factory=dict, repr=False)  # files of metrics so far, by inode

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.values["run"])

    @property
    def output(self) -> Path:
        """Output of the command, over all its starts."""
        return self.place / "output.txt"

    def start(self) -> None:
        """Start the command, the same one every time."""
        self.place.mkdir(parents=True, exist_ok=True)
        config = self.place / "train.yaml"
        config.write_text(yaml.safe_dump({"train": self.values}), encoding="utf-8")
        self.starts += 1
        with self.output.open("ab") as stream:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "declutr.trainer.train", str(config)],
                env=self.environment,
                cwd=self.place,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def wait(self, seconds: float = 300) -> int:
        """Wait for the command; return its exit status."""
        assert self.driver is not None
        try:
            return self.driver.wait(seconds * self.patience)
        except subprocess.TimeoutExpired as error:
            raise ChaosError(f"the command has not ended after {seconds:.0f} s") from error

    @property
    def over(self) -> bool:
        """Return whether the command was started and has ended."""
        return self.driver is not None and self.driver.poll() is not None

    def end(self) -> None:
        """Stop the command if it still runs."""
        while self._metrics:
            self._metrics.popitem()[1].close()
        if self.driver is not None and not self.over:
            self.driver.terminate()
            try:
                self.driver.wait(20 * self.patience)
            except subprocess.TimeoutExpired:
                self.driver.kill()
                self.driver.wait()

    def lines(self) -> dict[int, dict[str, Any]]:
        """Metrics lines of all steps, by step."""
        steps = [line for line in read_metrics(self.folder) if line["kind"] == "step"]
        by_step = {line["step"]: line for line in steps}
        if len(by_step) != len(steps):  # a resume must leave none out or twice
            raise ChaosError(f"{self.folder / METRICS}: contains a step twice")
        return by_step

    def last_step(self) -> int:
        """Last step in the metrics."""
        line = read_last_step(self.folder / METRICS)
        return 0 if line is None else int(line["step"])

    @property
    def inode(self) -> int | None:
        """Inode of the metrics, which a restart of the workers writes anew; None before the first step."""
        try:
            stream = (self.folder / METRICS).open("rb")
        except FileNotFoundError:
            return None
        number = os.fstat(stream.fileno()).st_ino
        if self._metrics.setdefault(number, stream) is not stream:  # open, or a later file could get its number
            stream.close()
        return number

    def snapshot(self) -> Snapshot:
        """Record this moment."""
        characters, inode, lines = self.output.stat().st_size, self.inode, self.lines()
        return Snapshot(time.time(), characters, inode, lines)  # the moment last: a fault strikes after these lines

    def messages(self, snapshot: Snapshot | None = None) -> str:
        """Output of the command since a moment or its first start, without the progress bar."""
        with self.output.open("rb") as stream:
            stream.seek(snapshot.characters if snapshot else 0)
            text = stream.read().decode(errors="replace")  # it may start or end within a character
        lines = [_BAR.sub("", part).strip() for line in text.split("\n") for part in line.split("\r")]
        return "\n".join(line for line in lines if line)

    def wait_for(
        self, what: str, check: Any, seconds: float = 120, ended: bool = False, every_seconds: float = _POLL_SECONDS
    ) -> Any:
        """Poll until `check` returns something true; `ended`: the command may end meanwhile."""
        deadline = time.monotonic() + seconds * self.patience
        while True:
            # Asked first, so that the check sees all that the command did before its end.
            status = None if ended or self.driver is None else self.driver.poll()
            if result := check():
                return result
            if status is not None:
                raise ChaosError(f"waiting for {what}: the command ended with status {status}")
            if time.monotonic() > deadline:
                raise ChaosError(f"waited {seconds:.0f} s for {what}")
            time.sleep(every_seconds)

    def wait_step(self, step: int, since: Snapshot | None = None) -> None:
        """Wait until a step is done; with `since`, by workers that started after that moment."""
        before = None if since is None else since.inode
        self.wait_for(f"step {step}", lambda: self.inode not in (None, before) and self.last_step() >= step)

    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint, complete or not; 0 before the first."""
        return max(steps_in(self.folder / CHECKPOINTS), default=0)

    def workers(self) -> list[psutil.Process]:
        """Training processes, in the order of their ranks."""

        def ranked_workers() -> list[psutil.Process]:
            ranks = {self._rank(worker): worker for worker in self.census.titled("RayTrainWorker")}
            return [ranks[rank] for rank in sorted(ranks)] if ranks and min(ranks) == 0 else []

        return self.wait_for("the workers", ranked_workers, every_seconds=0.5)

    def _rank(self, worker: psutil.Process) -> int:
        """Rank of a worker; -1 before it has one."""
        if worker.pid not in self._ranks:
            answer = Path(self.environment["DECLUTR_CHAOS"]) / f"{worker.pid}.rank"
            code = (
                f"import os\nwith open({str(answer)!r}, 'w') as stream:\n    stream.write(os.environ.get('RANK', '-1'))"
            )
            try:
                self.execute(worker, code)
            except ChaosError:  # it died meanwhile
                return -1
            rank = int(answer.read_text())
            if rank < 0:
                return rank
            self._ranks[worker.pid] = rank
        return self._ranks[worker.pid]

    def execute(self, process: psutil.Process, code: str) -> None:
        """Make a worker run a piece of Python, like a debugger (attached/sitecustomize.py)."""
        folder = Path(self.environment["DECLUTR_CHAOS"])
        aside = folder / f"{process.pid}.tmp"
        aside.write_text(code, encoding="utf-8")
        # Complete when the worker sees it.
        aside.rename(folder / f"{process.pid}.py")
        self.wait_for("the code to be run", lambda: not (folder / f"{process.pid}.py").exists(), 60)
