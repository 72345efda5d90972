"""`declutr checkpoints`."""

import argparse
import json
from dataclasses import asdict

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status, also 1 if the newest checkpoint is broken."""
    parser = argparse.ArgumentParser(prog="declutr checkpoints", description="List and verify a run's checkpoints.")
    parser.add_argument("run", type=path_argument, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    given = parser.parse_args(arguments)
    from declutr.inspection.checkpoints import CheckpointsError, rows, table

    try:
        found = rows(given.run)
    except (CheckpointsError, OSError) as error:
        return refused(error)
    if given.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    else:
        for line in table(found):
            print(line)
    return int(found[-1].broken is not None)
