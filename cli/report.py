"""`declutr report`."""

import argparse

from declutr.common.console.commandline import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr report", description="Write a page with charts on a prepared corpus, or on runs."
    )
    parser.add_argument("folder", type=path_argument, nargs="+", help="output folder of `prepare`, or folders of runs")
    parser.add_argument("--output", type=path_argument, help="folder of report.html (FOLDER/report)")
    given = parser.parse_args(arguments)
    from declutr.inspection.runs.record import RunError, is_run
    from declutr.pipeline.shards.shards import ShardError

    try:
        if any(map(is_run, given.folder)) or len(given.folder) > 1:
            from declutr.inspection.runs.page import write_run_report

            print(write_run_report(given.folder, given.output))
        else:
            from declutr.evaluation.report.page import write_report

            print(write_report(given.folder[0], given.output))
    except (ShardError, RunError) as error:
        return refused(error)
    return 0
