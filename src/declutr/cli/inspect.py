"""`declutr inspect` and `report`."""

import argparse
import json
from dataclasses import asdict

from declutr.common.console.terminal import refused
from declutr.common.paths import path_argument


def run_report(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="declutr report", description="Write a page with charts on a prepared corpus, or on runs."
    )
    parser.add_argument("folder", type=path_argument, nargs="+", help="output folder of `prepare`, or folders of runs")
    parser.add_argument("--output", type=path_argument, help="folder of report.html (FOLDER/report)")
    options = parser.parse_args(arguments)
    from declutr.common.extras import missing_extra

    if lack := missing_extra("report", "declutr report"):
        return refused(lack)
    if len(options.folder) > 1 or (options.folder[0] / "config.yaml").is_file():
        from declutr.report.runs import write_runs_page

        print(write_runs_page(options.folder, options.output))
    else:
        from declutr.report.corpus import write_corpus_page

        print(write_corpus_page(options.folder[0], options.output))
    return 0


def run_inspect(arguments: list[str]) -> int:
    """Run the command; return the exit status, also 1 if the newest checkpoint of a run is broken."""
    parser = argparse.ArgumentParser(
        prog="declutr inspect",
        description="Describe shards, an encoder, a checkpoint or a run, with each checkpoint verified and why it is "
        "kept.",
    )
    parser.add_argument("path", type=path_argument)
    parser.add_argument("--documents", type=int, default=3, help="documents of shards to show (3)")
    parser.add_argument("--document", help="show one document of shards, by id, source or SOURCE:OFFSET")
    parser.add_argument("--json", action="store_true", help="print the checkpoints of a run as a JSON list")
    parser.add_argument("--fast", action="store_true", help="compare only the sizes of checkpoints, not checksums")
    options = parser.parse_args(arguments)
    from declutr.inspection.describe import checkpoint_rows, describe, describe_run
    from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS

    broken = False
    if options.document:
        from declutr.inspection.describe import locate

        lines = locate(options.path, options.document)
    elif options.json or options.fast or (options.path / CHECKPOINTS).is_dir():
        rows = checkpoint_rows(options.path, verify=not options.fast)
        broken = bool(rows) and rows[-1].broken is not None
        listed = json.dumps([asdict(row) for row in rows], indent=2)
        lines = iter([listed]) if options.json else describe_run(options.path, rows, not options.fast)
    else:
        lines = describe(options.path, options.documents)
    for line in lines:
        print(line)
    return int(broken)
