"""python -m benchmarks.chaos [--json OUT] [--short] [--only NAME ...] [--seed N]: the fault matrix.

The exit status is 1 if a run does not recover from a fault, or if something is left behind.

The matrix: every fault once, alone or in sequence within a run, against the quiet run.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import record
from benchmarks.chaos.fault import End, Fault, FaultRow, compare, fail, observe
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.place import (
    Nodes,
    environment,
    leave_mounts_to_ourselves,
    mounts_below,
    prepare_values,
    small_disks,
    temporary,
    train_values,
    write_corpus,
)
from benchmarks.chaos.run import Census, ChaosError, Run, title
from benchmarks.record import progress
from declutr.common import seeding

# Faults of the short form.
SHORT = ("worker_hung", "worker_killed_while_saving", "controller_killed", "driver_killed")
STEPS = 900
SHORT_STEPS = 240  # the four faults above take about 130 of them
_CPUS_ON_NODES = 2  # of 3, so that a node takes one worker
_TAIL_LINES = 40
_AGENTS_SECONDS = 120  # after SIGKILL of their session, Ray's agents look for it for a minute and then exit


@dataclass
class Bench:
    """State shared by all runs: data, seed, the quiet run.

    Attributes:
        top: folder of all files.
        seed: seed of corpus, weights and moments of the faults.
        census: census of all our processes.
        steps: steps of a run whose faults do not need more.
        patience: factor of every timeout.
        quiet: state of the quiet run, by CPUs per worker and steps. On a CPU these are threads, and threads decide the
            order of sums; steps decide the schedule of the learning rate.
        left_behind: processes, mounts and folders that outlived the block of `opened`.
    """

    top: Path
    seed: int
    census: Census
    steps: int
    patience: float
    quiet: dict[tuple[int, int], End] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    _number: int = field(default=0, repr=False)

    def prepare(self, steps: int) -> None:
        """Make the shards, with documents for this many steps."""
        write_corpus(self.top / "corpus.jsonl", steps, self.seed)
        config = self.top / "prepare.yaml"
        values = prepare_values(self.top / "corpus.jsonl", self.top / "data")
        config.write_text(yaml.safe_dump({"prepare": values}), encoding="utf-8")
        command = [sys.executable, "-m", "declutr.pipeline.prepare", str(config)]
        subprocess.run(command, env=environment(self.top), check=True, capture_output=True)

    def undisturbed(self, cpus_per_worker: int, steps: int) -> End:
        """Return the end of the quiet run, which is trained once."""
        if (cpus_per_worker, steps) in self.quiet:
            return self.quiet[cpus_per_worker, steps]
        run = self.new_run(steps, {"scaling": {"cpus_per_worker": cpus_per_worker}})
        run.start()
        if run.wait(3600):
            raise ChaosError(f"the quiet run failed: {run.output.read_text()[-2000:]}")
        self.quiet[cpus_per_worker, steps] = quiet = End.of(run)
        progress(f"quiet run, {cpus_per_worker} CPUs per worker: {steps} steps in {quiet.seconds:.1f} s")
        return quiet

    def new_run(self, steps: int, changes: dict[str, Any]) -> Run:
        """Make a run in a new folder."""
        self._number += 1
        place = self.top / f"run{self._number}"
        values = train_values(self.top / "data", place / "run", steps, self.seed)
        for key, value in changes.items():
            values[key] = values[key] | value if isinstance(values.get(key), dict) else value
        return Run(place, values, self.census, environment(self.top), self.patience)

    def gap(self, fault: Fault) -> int:
        """Steps to wait before a fault."""
        # A checkpoint is saved every 20 steps; faults hit different places between two.
        return 22 + seeding.torch_seed(self.seed, "chaos", FAULTS.index(fault)) % 20

    def chain(self, faults: Sequence[Fault]) -> list[FaultRow]:
        """Cause these faults in one run, in sequence; start a new run after a fault that was not survived."""
        rows: list[FaultRow] = []
        while faults:
            results, faults = self._one_run(faults)
            rows += results
        return rows

    def _one_run(self, faults: Sequence[Fault]) -> tuple[list[FaultRow], Sequence[Fault]]:
        rows: list[FaultRow] = []
        changes = {key: value for fault in faults for key, value in fault.changes.items()}
        steps = max(self.steps, *(fault.steps for fault in faults))
        cpus = 1 if faults[0].setting == "machine" else _CPUS_ON_NODES
        quiet, run = self.undisturbed(cpus, steps), self.new_run(steps, changes)
        with self._setting(run, faults):
            run.start()
            step = 0
            for place, fault in enumerate(faults):
                started = time.monotonic()
                snapshot = None
                try:
                    if fault.trains:
                        run.wait_step(step + self.gap(fault))
                    row, snapshot = observe(run, fault)
                    step = run.last_step()
                except (ChaosError, LookupError, IndexError, OSError, ValueError, subprocess.SubprocessError) as error:
                    row = FaultRow(fault.name)
                    fail(row, f"{type(error).__name__}: {error}")
                if snapshot is not None:
                    fault.see(run, snapshot, row)
                rows.append(row)
                progress(f"{fault.name}: {row.problem or 'continues'} ({time.monotonic() - started:.0f} s)")
                if row.problem and snapshot is None:  # nothing is known of its state
                    run.end()
                    row.seen_by_user = row.seen_by_user or _last_line(run)
                    progress("\n".join(run.messages().splitlines()[-_TAIL_LINES:]))
                    if rows[:-1]:  # the earlier faults can only be judged at the end
                        run.start()
                        self._finish(run, rows[:-1], faults[0], quiet)
                    return rows, faults[place + 1 :]
            self._finish(run, rows, faults[0], quiet)
        return rows, ()

    def _finish(self, run: Run, rows: list[FaultRow], fault: Fault, quiet: End) -> None:
        """Wait for the end of the run, and compare."""
        status, problem = None, ""
        try:
            status = run.wait(600)
            problem = f"the command ended with status {status}: {_last_line(run)}" if status else ""
        except ChaosError as error:
            problem = str(error)
        if problem:
            for row in rows:
                fail(row, problem)
        for row in rows:
            compare(row, run, quiet, status == 0, fault.setting == "elastic", fault.alters)
            if row.recovered is None:
                row.recovered = True
        run.end()

    @contextmanager
    def _setting(self, run: Run, faults: Sequence[Fault]) -> Iterator[None]:
        setting = faults[0].setting
        if setting in ("cluster", "elastic"):
            nodes = Nodes(self.census)
            try:
                nodes.add(2)
                run.nodes = nodes
                run.values["scaling"] |= {"address": nodes.address, "cpus_per_worker": _CPUS_ON_NODES}
                if setting == "elastic":
                    run.values["scaling"]["num_workers"] = [1, 3]
                yield
            finally:
                run.end()
                nodes.close()
            return
        with small_disks(run) if any(fault.needs_root for fault in faults) else nullcontext():
            yield
            run.end()


@contextmanager
def opened(seed: int, steps: int, patience: float) -> Iterator[Bench]:
    """Make a bench in a temporary folder; afterwards find and kill what it left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup also runs after SIGTERM
    leave_mounts_to_ourselves()
    with temporary() as top:
        os.environ.update(environment(top))  # before importing Ray: cluster nodes inherit this environment
        os.environ.pop("RAY_ADDRESS", None)
        with Census() as census, census.nothing_outlives():
            bench = Bench(top, seed, census, steps, patience)
            yield bench
            left = census.wait_gone(_AGENTS_SECONDS)
            census.end(left)
            bench.left_behind += [f"process {process.pid} {title(process)[:200]}" for process in left]
        bench.left_behind += [f"mount {path}" for path in mounts_below(top)]
    bench.left_behind += [f"folder {top}"] if top.exists() else []


def _last_line(run: Run) -> str:
    lines = [line for line in run.messages().splitlines() if "\x1b" not in line]  # Ray's own lines are coloured
    return (lines or [""])[-1][-300:]


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix."""
    parser = record.parser("chaos", __doc__)
    parser.add_argument("--short", action="store_true", help="some faults, in one run: at most 3 minutes")
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME", help="faults")
    parser.add_argument("--steps", type=int, help=f"steps of each run ({STEPS}; short: {SHORT_STEPS})")
    parser.add_argument("--patience", type=float, default=1, help="multiplies every timeout, for busy machines")
    options = record.parse(parser, arguments)
    steps = options.steps or (SHORT_STEPS if options.short else STEPS)
    names = options.only or (SHORT if options.short else [fault.name for fault in FAULTS])
    chosen = [fault for fault in FAULTS if fault.name in names]
    begun = time.monotonic()
    with opened(options.seed, steps, options.patience) as bench:
        bench.prepare(max(steps, *(fault.steps for fault in chosen)))
        rows = [FaultRow(fault.name, problem="not tried: needs root") for fault in chosen if not fault.possible]
        possible = [fault for fault in chosen if fault.possible]
        for group in [possible] if options.short and not options.only else [[fault] for fault in possible]:
            rows += bench.chain(group)
    rows.sort(key=lambda row: [fault.name for fault in FAULTS].index(row.name))
    figures = {
        "steps": steps,
        "seconds": round(time.monotonic() - begun, 1),
        "left_behind": bench.left_behind,
        "faults": [
            {key: round(value, 2) if key.endswith("seconds") and value else value for key, value in asdict(row).items()}
            for row in rows
        ],
    }
    record.publish(figures, options)
    print(table(rows))
    for line in bench.left_behind:
        print(f"left behind: {line}")
    return int(bool(bench.left_behind) or any(row.recovered is False for row in rows))


def table(rows: list[FaultRow]) -> str:
    """Format the matrix as a Markdown table."""
    lines = [
        "| fault | recovered | lost s | back after s | batches | parameters | commands | what the user saw |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            row.name,
            {True: "yes", False: "NO", None: "-"}[row.recovered],
            "-" if row.lost_seconds is None else f"{row.lost_seconds:.1f}",
            "-" if row.recovery_seconds is None else f"{row.recovery_seconds:.1f}",
            {True: "same", False: "OTHER", None: "-"}[row.batches_identical],
            {True: "same bits", False: "OTHER", None: "-"}[row.parameters_identical],
            str(row.commands),
            " ".join(part for part in (row.seen_by_user, f"[{row.problem}]" if row.problem else "") if part),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
