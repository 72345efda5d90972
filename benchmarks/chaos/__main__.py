"""python -m benchmarks.chaos [--json OUT] [--short] [--only NAME ...] [--seed N]: the fault matrix.

The exit status is 1 if a run does not recover from a fault, or if something is left behind.
"""

import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.chaos.census import Census
from benchmarks.chaos.fault import FaultRow
from benchmarks.chaos.matrix import FAULTS, SHORT, SHORT_STEPS, STEPS, Bench, chains
from benchmarks.chaos.place import environment, leave_mounts_to_ourselves, mounts_below, temporary
from benchmarks.record import facts, parser, progress, publish

_SHORT_AWAY_SECONDS = 4.0
_AGENTS_SECONDS = 120  # after SIGKILL of their session, Ray's agents look for it for a minute and then exit


def main() -> int:
    """Run the matrix."""
    options = parser("chaos", __doc__)
    options.add_argument("--short", action="store_true", help="some faults, in shared runs: at most 5 minutes")
    options.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME", help="faults")
    options.add_argument("--steps", type=int, help=f"steps of each run ({STEPS}; short: {SHORT_STEPS})")
    options.add_argument("--patience", type=float, default=1, help="multiplies every timeout, for busy machines")
    given = options.parse_args()
    given.steps = given.steps or (SHORT_STEPS if given.short else STEPS)
    names = given.only or (SHORT if given.short else [fault.name for fault in FAULTS])
    chosen = [fault for fault in FAULTS if fault.name in names]
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that cleanup also runs after SIGTERM
    leave_mounts_to_ourselves()
    record = facts("chaos", given.commit)
    with temporary() as top:
        os.environ.update(environment(top))  # before importing Ray: cluster nodes inherit this environment
        os.environ.pop("RAY_ADDRESS", None)
        with Census() as census, census.nothing_outlives():
            bench = Bench(top, given.seed, census, progress, given.steps)
            bench.patience = given.patience
            if given.short:
                bench.away_seconds = _SHORT_AWAY_SECONDS
            rows = [FaultRow(fault.name, problem="not tried: needs root") for fault in chosen if not fault.possible]
            bench.prepare()
            bench.undisturbed()
            for group in chains([fault for fault in chosen if fault.possible], given.short):
                rows += bench.chain(group)
            left = left_behind(census)
        left += [f"mount {path}" for path in mounts_below(top)]
    if top.exists():
        left.append(f"folder {top}")
    rows.sort(key=lambda row: [fault.name for fault in FAULTS].index(row.name))
    figures = {
        **record,
        "steps": given.steps,
        "seconds": round(time.monotonic() - begun, 1),
        "left_behind": left,
        "faults": [_rounded(asdict(row)) for row in rows],
    }
    publish(figures, given.json)
    print(table(rows))
    for line in left:
        print(f"left behind: {line}")
    return int(bool(left) or any(row.recovered is False for row in rows))


def left_behind(census: Census) -> list[str]:
    """Kill our processes that are still alive after everything has ended, and list them."""
    left = census.wait_gone(_AGENTS_SECONDS)
    census.end(left)
    return [f"process {process.pid} {process.title[:200]}" for process in left]


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


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: round(value, 2) if isinstance(value, float) and key.endswith("seconds") else value
        for key, value in row.items()
    }


if __name__ == "__main__":
    sys.exit(main())
