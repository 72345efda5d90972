"""python -m benchmarks.chaos.soak --minutes 30 --seed N --json OUT: training with a random fault every minute.

The n-th fault is drawn from (seed, "chaos", n). The run must end with the parameters of the quiet run, else the status
is 1.
"""

import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict

from benchmarks import record
from benchmarks.chaos.__main__ import table
from benchmarks.chaos.fault import FaultRow, observe
from benchmarks.chaos.faults import FILES, KILLS, WORKING
from benchmarks.chaos.matrix import Bench, opened
from benchmarks.chaos.place import small_disks
from benchmarks.chaos.run import ChaosError, Run
from declutr.common import seeding

_EVERY_SECONDS = 60.0
_MEASURED_STEPS = 300
_AWAY_SECONDS = 10.0
_SHARE_TRAINING = 0.6  # approximate share of a minute with a fault spent in training; starts take the rest
_KINDS = tuple(fault for fault in (*KILLS, *WORKING, *FILES) if fault.trains)


def soak(bench: Bench, run: Run, seed: int, rows: list[FaultRow]) -> None:
    """Train to the end, with a fault every minute, and record a row for each."""
    kinds = tuple(fault for fault in _KINDS if fault.possible)
    run.start()
    run.wait_step(1, seconds=300)
    due = time.monotonic() + _EVERY_SECONDS
    while True:
        while time.monotonic() < due and not run.over:
            time.sleep(0.5)
        # a fault needs steps to be noticed and to recover from, so none is caused just before the end
        if run.last_step() > bench.steps - 500 or run.over:
            break
        fault = kinds[seeding.torch_seed(seed, "chaos", len(rows)) % len(kinds)]
        due = time.monotonic() + _EVERY_SECONDS
        row, snapshot = observe(run, fault)
        fault.see(run, snapshot, row)
        rows.append(row)
        record.progress(f"{len(rows)}: {fault.name}: {row.problem or 'continues'}, step {run.last_step()}")
    if status := run.wait(900):
        raise ChaosError(f"the command ended with status {status}: {run.output.read_text(errors='replace')[-1000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Run the soak."""
    parser = record.parser("chaos.soak", __doc__)
    parser.add_argument("--patience", type=float, default=1, help="multiplies every timeout, for busy machines")
    parser.add_argument("--minutes", type=float, default=30, help="approximate time of training with faults (30)")
    options = record.parse(parser, arguments)
    rows: list[FaultRow] = []
    problem = ""
    begun = time.monotonic()
    with opened(options.seed, _MEASURED_STEPS, _AWAY_SECONDS, options.patience) as bench:
        record.progress(f"seed {options.seed}")
        a_step = bench.undisturbed().seconds / _MEASURED_STEPS
        # this means several epochs, because the corpus was made for the first run
        bench.steps = max(1000, round(options.minutes * 60 * _SHARE_TRAINING / a_step / 100) * 100)
        quiet = bench.undisturbed()
        run = bench.new_run()
        soaked = time.monotonic()
        with small_disks(run) if os.geteuid() == 0 else nullcontext():
            try:
                soak(bench, run, options.seed, rows)
                bench.judge(run, rows)
            except ChaosError as error:
                problem = str(error)
                bench.judge(run, rows, ended=False)
        soaked = time.monotonic() - soaked
    figures = {
        "seed": options.seed,
        "steps": bench.steps,
        "quiet_seconds": round(quiet.seconds, 1),
        "soak_seconds": round(soaked, 1),
        "seconds": round(time.monotonic() - begun, 1),
        "problem": problem,
        "left_behind": bench.left_behind,
        "faults": [asdict(row) for row in rows],
    }
    record.publish(figures, options)
    print(table(rows))
    print(f"seed {options.seed}: {len(rows)} faults in {bench.steps} steps {problem}")
    return int(bool(problem or bench.left_behind) or not rows or any(not row.recovered for row in rows))


if __name__ == "__main__":
    sys.exit(main())
