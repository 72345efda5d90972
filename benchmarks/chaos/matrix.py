"""The matrix: every fault once, alone or one after the other within a run, against the quiet run."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos import workload
from benchmarks.chaos.census import Census
from benchmarks.chaos.compare import End, differences
from benchmarks.chaos.fault import Fault, Row, fail, observe
from benchmarks.chaos.faults import files, kills, nodes, skipping, workers
from benchmarks.chaos.place import Nodes, environment, small_disks
from benchmarks.chaos.run import ChaosError, Mark, Run
from common import seeding

FAULTS = (*workers.FAULTS, *kills.FAULTS, *files.FAULTS, *skipping.FAULTS, *nodes.FAULTS)
# What the short form tries.
SHORT = (
    "worker_killed",
    "worker_hung",
    "disk_full",
    "worker_killed_while_saving",
    "controller_killed",
    "driver_terminated",
    "driver_killed",
    "broken_checkpoints",
    "changed_shard",
)
STEPS = 900
SHORT_STEPS = 450  # the nine faults above take about 280 of them
_CPUS_ON_NODES = 2  # of 3: one worker a node
_TAIL_LINES = 40
_LAST_IN_CHAIN = ("driver_killed_exporting",)


@dataclass
class Bench:
    """What all runs share: data, seed, the quiet run.

    Attributes:
        top: folder of everything.
        seed: of corpus, weights and moments of the faults.
        census: of all our processes.
        say: tells the person who waits.
        steps: of a run.
        away_seconds: how long storage stays away.
        patience: by which every limit of waiting is multiplied.
        quiet: what the quiet run came to, by CPUs per worker: on a CPU these are threads, and threads decide the order
            of sums.
    """

    top: Path
    seed: int
    census: Census
    say: Callable[[str], None]
    steps: int = STEPS
    away_seconds: float = files.AWAY_SECONDS
    patience: float = 1.0
    quiet: dict[int, End] = field(default_factory=dict)
    _number: int = field(default=0, repr=False)

    @property
    def data(self) -> Path:
        """Folder of the shards."""
        return self.top / "data"

    def prepare(self) -> None:
        """Makes the shards."""
        workload.write_corpus(self.top / "corpus.jsonl", self.steps, self.seed)
        config = self.top / "prepare.yaml"
        values = workload.prepare_values(self.top / "corpus.jsonl", self.data)
        config.write_text(yaml.safe_dump({"prepare": values}), encoding="utf-8")
        made = [sys.executable, "-m", "pipeline.prepare", str(config)]
        subprocess.run(made, env=environment(self.top), check=True, capture_output=True)

    def undisturbed(self, cpus_per_worker: int = 1) -> End:
        """Makes the quiet run."""
        run = self.new_run({"scaling": {"cpus_per_worker": cpus_per_worker}})
        run.start()
        if run.wait(3600):
            raise ChaosError(f"the quiet run fails: {run.output.read_text()[-2000:]}")
        self.quiet[cpus_per_worker] = quiet = End.of(run)
        self.say(f"quiet run, {cpus_per_worker} CPUs a worker: {self.steps} steps in {quiet.seconds:.1f} s")
        return quiet

    def new_run(self, changes: dict[str, Any] | None = None) -> Run:
        """A run in a folder of its own."""
        self._number += 1
        place = self.top / f"run{self._number}"
        values = workload.train_values(self.data, place / "run", self.steps, self.seed)
        for key, value in (changes or {}).items():
            values[key] = values[key] | value if isinstance(values.get(key), dict) else value
        away = {"DECLUTR_CHAOS_AWAY": str(self.away_seconds)}
        return Run(place, values, self.census, environment(self.top) | away, patience=self.patience)

    def gap(self, fault: Fault) -> int:
        """Steps to wait before a fault; drawn, so that it is not always the same place in a checkpoint's interval."""
        return 22 + seeding.torch_seed(self.seed, "chaos", FAULTS.index(fault)) % 20

    def chain(self, faults: Sequence[Fault]) -> list[Row]:
        """Does these faults to one run, one after the other; to a new one after a fault that was not survived."""
        rows: list[Row] = []
        while faults:
            some, faults = self._one_run(faults)
            rows += some
        return rows

    def _one_run(self, faults: Sequence[Fault]) -> tuple[list[Row], Sequence[Fault]]:
        rows: list[Row] = []
        changes = {key: value for fault in faults for key, value in fault.changes.items()}
        run = self.new_run(changes)
        with self._setting(run, faults):
            run.start()
            step = 0
            for place, fault in enumerate(faults):
                begun = time.monotonic()
                mark = None
                try:
                    if fault.trains:
                        run.wait_step(step + self.gap(fault))
                    row, mark = observe(run, fault)
                    step = run.last_step()
                except (ChaosError, LookupError, IndexError, OSError, ValueError, subprocess.SubprocessError) as error:
                    row = Row(fault.name)
                    fail(row, f"{type(error).__name__}: {error}")
                if mark is not None:
                    row.seen_by_user, problem = fault.seen(run, mark)
                    if problem:
                        fail(row, problem)
                rows.append(row)
                self.say(f"{fault.name}: {row.problem or 'goes on'} ({time.monotonic() - begun:.0f} s)")
                if row.problem and mark is None:
                    run.end()
                    row.seen_by_user = row.seen_by_user or _last_line(run)
                    self.say("\n".join(run.said(Mark(0, 0, None, {})).splitlines()[-_TAIL_LINES:]))
                    if rows[:-1]:  # what they left can only be judged at the end
                        run.start()
                        self._finish(run, rows[:-1], faults[0])
                    return rows, faults[place + 1 :]
            self._finish(run, rows, faults[0])
        return rows, ()

    def _finish(self, run: Run, rows: list[Row], fault: Fault) -> None:
        """Waits for the end of the run, and compares."""
        status, problem = None, ""
        try:
            status = run.wait(600)
            problem = f"the command ended with status {status}: {_last_line(run)}" if status else ""
        except ChaosError as error:
            problem = str(error)
        if problem:
            for row in rows:
                fail(row, problem)
        self.judge(run, rows, status == 0, fault.setting == "elastic", fault.alters)
        run.end()

    def judge(
        self, run: Run, rows: list[Row], ended: bool = True, world_changes: bool = False, alters: bool = False
    ) -> None:
        """Compares with the quiet run: to the end, or as far as the run came."""
        quiet = self.quiet[run.values["scaling"].get("cpus_per_worker", 1)]
        found = differences(run, quiet, ended, world_changes, alters)
        for row in rows:
            row.batches_identical = found.batches_identical
            row.parameters_identical = found.parameters_identical
            row.loss_difference = found.loss_difference
            for problem in found.problems:
                fail(row, problem)
            if row.recovered is None:
                row.recovered = True

    @contextmanager
    def _setting(self, run: Run, faults: Sequence[Fault]) -> Iterator[None]:
        setting = faults[0].setting
        if setting in ("cluster", "elastic"):
            if _CPUS_ON_NODES not in self.quiet:
                self.undisturbed(_CPUS_ON_NODES)
            made = Nodes(self.census)
            try:
                made.add(2)
                run.nodes = made
                run.values["scaling"] |= {"address": made.address, "cpus_per_worker": _CPUS_ON_NODES}
                if setting == "elastic":
                    run.values["scaling"]["workers"] = [1, 3]
                yield
            finally:
                run.end()
                made.close()
            return
        with small_disks(run) if any(fault.needs_root for fault in faults) else nullcontext():
            yield
            run.end()


def chains(faults: Sequence[Fault], short: bool) -> list[list[Fault]]:
    """Which faults share a run: in the short form those of one setting, else none."""
    if not short:
        return [[fault] for fault in faults]
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.setting, []).append(fault)
    return [sorted(group, key=lambda fault: fault.name in _LAST_IN_CHAIN) for group in groups.values()]


def _last_line(run: Run) -> str:
    lines = [
        line for line in run.said(Mark(0, 0, None, {})).splitlines() if "\x1b" not in line
    ]  # Ray's own are coloured
    return (lines or [""])[-1][-300:]
