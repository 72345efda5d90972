"""`declutr inspect`."""

import argparse

from declutr.common.console.commandline import refused
from declutr.common.paths import path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr inspect", description="Describe shards, a run or a checkpoint.")
    parser.add_argument("path", type=path_argument)
    parser.add_argument("--documents", type=int, default=3, help="documents of shards to show (3)")
    parser.add_argument("--document", help="show one document of shards, by id, source or SOURCE:OFFSET")
    given = parser.parse_args(arguments)
    from declutr.inspection.describe import DescribeError, describe
    from declutr.pipeline.shards.shards import ShardError
    from declutr.trainer.checkpoints.checkpoint import CheckpointError

    try:
        if given.document:
            from declutr.inspection.locate import locate

            lines = locate(given.path, given.document)
        else:
            lines = describe(given.path, given.documents)
        for line in lines:
            print(line)
    except (DescribeError, ShardError, CheckpointError) as error:
        return refused(error)
    return 0
