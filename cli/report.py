"""`declutr report`."""

import argparse

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr report", description="Write a page with charts on a prepared corpus."
    )
    parser.add_argument("shards", type=path_argument, help="output folder of `prepare`")
    parser.add_argument("--output", type=path_argument, help="folder of report.html and charts/*.png (SHARDS/report)")
    given = parser.parse_args(arguments)
    from declutr.evaluation.report.page import write_report
    from declutr.pipeline.shards.shards import ShardError

    try:
        print(write_report(given.shards, given.output))
    except ShardError as error:
        return refused(error)
    return 0
