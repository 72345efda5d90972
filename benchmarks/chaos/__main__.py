"""python -m benchmarks.chaos [--json OUT] [--short] [--only NAME ...] [--seed N]: the fault matrix.

The exit status is 1 if a run does not recover from a fault, or if something is left behind.
"""

import sys
import time
from dataclasses import asdict

from benchmarks import record
from benchmarks.chaos.fault import FaultRow
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.matrix import SHORT, SHORT_STEPS, STEPS, chains, opened


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix."""
    parser = record.parser("chaos", __doc__)
    parser.add_argument("--short", action="store_true", help="some faults, in shared runs: at most 3 minutes")
    parser.add_argument("--only", nargs="+", choices=[fault.name for fault in FAULTS], metavar="NAME", help="faults")
    parser.add_argument("--steps", type=int, help=f"steps of each run ({STEPS}; short: {SHORT_STEPS})")
    parser.add_argument("--patience", type=float, default=1, help="multiplies every timeout, for busy machines")
    options = record.parse(parser, arguments)
    steps = options.steps or (SHORT_STEPS if options.short else STEPS)
    names = options.only or (SHORT if options.short else [fault.name for fault in FAULTS])
    chosen = [fault for fault in FAULTS if fault.name in names]
    begun = time.monotonic()
    with opened(options.seed, steps, options.patience) as bench:
        rows = [FaultRow(fault.name, problem="not tried: needs root") for fault in chosen if not fault.possible]
        bench.undisturbed()
        for group in chains([fault for fault in chosen if fault.possible], options.short):
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
