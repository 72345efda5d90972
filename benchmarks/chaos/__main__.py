"""python -m benchmarks.chaos [--json OUT] [--only NAME ...] [--together] [--seed N]: the fault matrix.

The exit status is 1 if a run does not recover from a fault, or if something is left behind.

The matrix: every fault once, in a run of its own or in turn in one run, against the quiet run.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
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

STEPS = 900
_CPUS_ON_NODES = 2  # of 3, so that a node takes one worker
_TAIL_LINES = 40
_UNOBSERVED = (ChaosError, LookupError, OSError, ValueError, subprocess.SubprocessError, psutil.Error)
_AGENTS_SECONDS = 120  # after SIGKILL of their session, Ray's agents look for it for a minute and then exit


@dataclass
class Bench:
    """State shared by all runs: data, seed, the quiet runs."""

    top: Path  # folder of all files
    seed: int  # seed of corpus, weights and moments of the faults
    census: Census  # census of all our processes
    steps: int  # steps of a run whose fault has no number of its own
    patience: float  # factor of every timeout
    # state of the quiet runs, by CPUs per worker and steps. On a CPU these are threads, and threads decide the order of
    # sums; steps decide the schedule of the learning rate.
    quiet: dict[tuple[int, int], End] = field(default_factory=dict)
    _number: int = field(default=0, repr=False)

    def prepare(self, steps: int) -> None:
        """Make the shards, with enough documents for this many steps."""
        write_corpus(self.top / "corpus.jsonl", steps, self.seed)
        config = self.top / "prepare.yaml"
        values = prepare_values(self.top / "corpus.jsonl", self.top / "data")
        config.write_text(yaml.safe_dump({"prepare": values}), encoding="utf-8")
        command = [sys.executable, "-m", "declutr.pipeline.prepare", str(config)]
        subprocess.run(command, env=environment(self.top), check=True, capture_output=True)

    def undisturbed(self, cpus_per_worker: int, steps: int) -> End:
        """The end of the quiet run, which is trained once."""
        if (cpus_per_worker, steps) not in self.quiet:
            run = self.new_run(steps, {"scaling": {"cpus_per_worker": cpus_per_worker}})
            run.start()
            if run.wait(3600):
                raise ChaosError(f"the quiet run failed: {run.output.read_text()[-2000:]}")
            self.quiet[cpus_per_worker, steps] = quiet = End.of(run)
            progress(f"quiet run, {cpus_per_worker} CPUs per worker: {steps} steps in {quiet.seconds:.1f} s")
        return self.quiet[cpus_per_worker, steps]

    def new_run(self, steps: int, changes: dict[str, Any]) -> Run:
        """Make a run in a new folder."""
        self._number += 1
        place = self.top / f"run{self._number}"
        values = train_values(self.top / "data", place / "run", steps, self.seed)
        for key, value in changes.items():
            values[key] = values[key] | value if isinstance(values.get(key), dict) else value
        return Run(place, values, self.census, environment(self.top), self.patience)

    def cause(self, *faults: Fault) -> list[FaultRow]:
        """Cause faults of one setting in one run, in turn, and compare the run's end with that of the quiet run."""
        setting, rows = faults[0].setting, [FaultRow(fault.name) for fault in faults]
        if not all(fault.possible for fault in faults):
            return [replace(row, problem="not tried: needs root") for row in rows]
        steps = max([self.steps, *(fault.steps for fault in faults)])
        cpus = 1 if setting == "machine" else _CPUS_ON_NODES
        quiet = self.undisturbed(cpus, steps)
        run = self.new_run(steps, {key: value for fault in faults for key, value in fault.changes.items()})
        started = time.monotonic()
        with ExitStack() as stack:
            if setting != "machine":
                run.nodes = stack.enter_context(closing(Nodes(self.census, 2)))
                run.values["scaling"] |= {"address": run.nodes.address, "cpus_per_worker": cpus}
            if setting == "elastic":
                run.values["scaling"]["num_workers"] = [1, 3]
            if any(fault.needs_root for fault in faults):
                stack.enter_context(small_disks(run))
            stack.callback(run.end)  # before its nodes and disks go
            try:
                run.start()
                for fault, row in zip(faults, rows, strict=True):
                    if fault.trains:
                        # A checkpoint is saved every 20 steps; faults hit different places between two.
                        place = seeding.torch_seed(self.seed, "chaos", FAULTS.index(fault)) % 20
                        run.wait_step(run.last_step() + 22 + place)
                    fault.see(run, observe(run, fault, row), row)
                if status := run.wait(600):
                    raise ChaosError(f"the command ended with status {status}: {_last_line(run)}")
                for fault, row in zip(faults, rows, strict=True):
                    compare(row, run, quiet, fault)
            except _UNOBSERVED as error:
                for row in rows:
                    fail(row, f"{type(error).__name__}: {error}")
                    row.seen_by_user = row.seen_by_user or _last_line(run)
                progress("\n".join(run.messages().splitlines()[-_TAIL_LINES:]))
        for row in rows:
            row.recovered = not row.problem
            progress(f"{row.name}: {row.problem or 'recovered'}")
        progress(f"{time.monotonic() - started:.0f} s")
        return rows


def _last_line(run: Run) -> str:
    lines = [line for line in run.messages().splitlines() if "\x1b" not in line]  # Ray's own lines are coloured
    return (lines or [""])[-1][-300:]


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix."""
    parser = record.parser("chaos", __doc__)
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME", help="faults")
    parser.add_argument("--together", action="store_true", help="cause them in turn in one run: faults of one setting")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run ({STEPS}); elastic faults take more")
    parser.add_argument("--patience", type=float, default=1, help="multiplies every timeout, for busy machines")
    options = record.parse(parser, arguments)
    chosen = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    if options.together and len({fault.setting for fault in chosen}) > 1:
        parser.error("--together takes faults of one setting: choose them with --only")
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup also runs after SIGTERM
    leave_mounts_to_ourselves()
    with temporary() as top:
        os.environ.update(environment(top))  # before importing Ray: cluster nodes inherit this environment
        os.environ.pop("RAY_ADDRESS", None)  # a cluster of the user's must see no fault
        with Census() as census:
            bench = Bench(top, options.seed, census, options.steps, options.patience)
            bench.prepare(max([options.steps, *(fault.steps for fault in chosen)]))
            groups = [chosen] if options.together else [[fault] for fault in chosen]
            rows = [row for group in groups for row in bench.cause(*group)]
            left = [f"process {p.pid} {title(p)[:200]}" for p in census.wait_gone(_AGENTS_SECONDS)]
        left += [f"mount {path}" for path in mounts_below(top)]
    left += [f"folder {top}"] if top.exists() else []
    figures = {
        "steps": options.steps,
        "seconds": round(time.monotonic() - begun, 1),
        "left_behind": left,
        "faults": [
            {key: round(value, 2) if key.endswith("seconds") and value else value for key, value in asdict(row).items()}
            for row in rows
        ],
    }
    record.publish(figures, options)
    print(table(rows))
    for line in left:
        print(f"left behind: {line}")
    return int(bool(left) or any(row.recovered is False for row in rows))


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
