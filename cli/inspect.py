"""`declutr inspect`, `report` and `checkpoints`."""

import argparse
import json
from dataclasses import asdict

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run_report(arguments: list[str]) -> int:
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


def run_inspect(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="declutr inspect", description="Describe shards, a run or a checkpoint.")
    parser.add_argument("path", type=path_argument)
    parser.add_argument("--documents", type=int, default=3, help="documents of shards to show with their spans (3)")
    parser.add_argument("--document", help="show one document of shards, by id, source or SOURCE:OFFSET")
    parser.add_argument("--config", help="YAML file with a `train` section: show its run's spans, views")
    parser.add_argument(
        "--auxiliary-task", metavar="NAME", help="its task `auxiliary_tasks.NAME`, whose views are shown"
    )
    parser.add_argument("--seed", type=int, help="seed of the spans shown (the config's, else 0)")
    parser.add_argument("--epoch", type=int, default=0, help="epoch of the spans shown (0)")
    given = parser.parse_args(arguments)
    from declutr.common.config import ConfigError, load_config
    from declutr.trainer.setup.config import TrainConfig

    try:
        run = load_config(given.config, "train", TrainConfig, []) if given.config is not None else None
        if given.auxiliary_task is not None:
            if run is None or given.auxiliary_task not in run.auxiliary_tasks:
                names = (
                    ", ".join(run.auxiliary_tasks) or "no auxiliary task" if run else "no config, which --config names"
                )
                raise ConfigError(
                    "--auxiliary-task",
                    [f"{given.auxiliary_task}: is not an auxiliary task of the run; there is {names}"],
                )
            run = run.of_task(given.auxiliary_task)
    except ConfigError as error:
        return refused(error)
    from declutr.inspection.describe import DescribeError, default_spans, describe
    from declutr.pipeline.shards.shards import ShardError, load_manifest
    from declutr.trainer.checkpoints.checkpoint import CheckpointError
    from declutr.trainer.objectives.config import ObjectiveError

    try:
        seed = given.seed if given.seed is not None else run.seed if run else 0
        if given.document:
            from declutr.inspection.locate import locate

            spans = run.spans if run else default_spans(load_manifest(given.path))
            lines = locate(given.path, given.document, spans, seed, given.epoch, run)
        else:
            lines = describe(given.path, given.documents, seed, given.epoch, run)
        for line in lines:
            print(line)
    except (DescribeError, ShardError, CheckpointError, ObjectiveError) as error:
        return refused(error)
    return 0


def run_checkpoints(arguments: list[str]) -> int:
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
