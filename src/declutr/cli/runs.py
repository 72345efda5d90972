"""`declutr inspect`, `report`, `why`, `verify-gradients`, `reproduce`: commands that describe or make runs."""

import json
from argparse import ArgumentTypeError
from dataclasses import asdict
from pathlib import Path

from declutr.cli import Parser
from declutr.common.console.logs import setup_logging
from declutr.common.console.terminal import refused
from declutr.common.errors import missing_extra
from declutr.common.paths import check_there, folder_problem, path_argument

_SHOWN_CHARACTERS = 160


def run_inspect(arguments: list[str]) -> int:
    """Describe shards, an encoder, a checkpoint or a run; return 1 if the newest checkpoint of a run is broken."""
    parser = Parser("inspect", "Describe shards, an encoder, a checkpoint or a run, with each checkpoint verified and "
                    "why it is kept.")  # fmt: skip
    parser.add_argument("path", type=path_argument)
    parser.add_argument("--documents", type=int, default=3, help="documents of shards to show (3)")
    parser.add_argument("--document", help="show one document of shards, by id, source or SOURCE:OFFSET")
    parser.add_argument("--json", action="store_true", help="print the checkpoints of a run as a JSON list")
    parser.add_argument("--fast", action="store_true", help="compare only the sizes of checkpoints, not checksums")
    options = parser.parse_args(arguments)
    if options.documents < 0:
        parser.error(f"--documents {options.documents}: must be at least 0, which shows none")
    check_there([options.path])
    from declutr.inspection.describe import checkpoint_rows, describe, describe_run, locate
    from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS

    broken = False
    if options.document:
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


def run_report(arguments: list[str]) -> int:
    """Write a page on a corpus or on runs; return the exit status."""
    parser = Parser("report", "Write a page with charts on a prepared corpus, or on runs.")
    parser.add_argument("folder", type=path_argument, nargs="+", help="output folder of `prepare`, or folders of runs")
    parser.add_argument("--output", type=path_argument, help="folder of report.html (FOLDER/report)")
    options = parser.parse_args(arguments)
    if lack := missing_extra("report", "declutr report"):
        return refused(lack)
    check_there(options.folder)
    if file := next(filter(Path.is_file, options.folder), None):
        return refused(f"{file}: is a file; name the folder of a run, or of shards")
    output = options.output
    if output and output.suffix == ".html":
        return refused(f"--output {output}: is a folder, in which report.html is written; name one")
    if output and (problem := folder_problem(output)):
        return refused(f"--output {output}: {problem}")
    if output and output.is_dir() and (foreign := sorted({path.name for path in output.iterdir()} - {"report.html"})):
        return refused(f"--output {output}: holds {foreign[0]}; name a new folder")
    if len(options.folder) > 1 or any((options.folder[0] / name).exists() for name in ("config.yaml", "checkpoints")):
        from declutr.report.runs import write_runs_page

        print(write_runs_page(options.folder, output))
    else:
        from declutr.report.corpus import write_corpus_page

        print(write_corpus_page(options.folder[0], output))
    return 0


def run_why(arguments: list[str]) -> int:
    """Show what a step reads; return 1 if a step's digest is not the one that the run logged."""
    parser = Parser("why", "Show what a step reads, or the steps that read a document.")
    parser.add_argument("run", type=path_argument, help="folder of a run, or YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as data=FOLDER")
    parser.add_argument("--step", type=int, help="show the documents, spans, masks and views of this step")
    parser.add_argument("--document", help="show every step that reads a document: id, source or SOURCE:OFFSET")
    parser.add_argument("--full", action="store_true", help="show whole texts")
    options = parser.parse_intermixed_args(arguments)
    if options.step is None and options.document is None:
        parser.error("give --step, --document or both")
    if not options.run.suffix:  # a config may be one of the package
        check_there([options.run])
    from declutr.inspection.order import read_order

    order = read_order(options.run, options.overrides)
    if options.step is None:
        for line in order.document_lines(options.document):
            print(line)
        return 0
    from declutr.inspection.views import step_lines

    as_logged = True
    for line, right in step_lines(order, options.step, options.document, None if options.full else _SHOWN_CHARACTERS):
        as_logged &= right  # every line is shown, also after a difference
        print(line)
    return int(not as_logged)


def run_verify_gradients(arguments: list[str]) -> int:
    """Compare gradients across numbers of processes; return 1 if one differs by more than rounding."""
    parser = Parser("verify-gradients", "Compare gradients: 1 process with N, whole batches with microbatches.")
    parser.shared("config", "overrides")
    parser.add_argument("--documents", type=int, default=8, help="most documents in the batch (8)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3], help="numbers of workers to try (2 3)")
    options = parser.parse_intermixed_args(arguments)
    from declutr.common.config import load_config
    from declutr.trainer.config import TrainConfig
    from declutr.trainer.driver.checks import place_problems

    if options.documents < 1 or min(options.processes) < 1:
        parser.error("--documents and --processes must be at least 1")
    config = load_config(options.config, "train", TrainConfig, options.overrides, place_problems)
    from declutr.trainer.driver.checks import load_problems, refuse, resolve
    from declutr.trainer.verify import verify

    resolved = resolve(config, of_run=False)  # the run's folder may hold another run
    refuse(load_problems(resolved))
    print("gradient of one batch, compared with 1 process and the whole batch at once")
    heads = ("precision", "processes", "microbatch", "loss diff", "largest", "relative")
    print("".join(f"{head:>11s}" for head in heads))
    apart = 0
    for row in verify(resolved.config, options.documents, options.processes):
        case, cut = row.case, row.case.microbatch_tokens or "whole"
        numbers = f"{row.loss:10.1e} {row.absolute:10.1e} {row.relative:10.1e}"
        within = "" if row.within else "  APART"
        print(f"{case.precision:>9s} {case.processes:9d} {cut:>10} {numbers}{within}", flush=True)
        apart += not row.within
    print("all equal up to rounding" if not apart else f"{apart} cases differ by more than rounding")
    return int(apart > 0)


def run_reproduce(arguments: list[str]) -> int:
    """Run a table or figure of a paper; return the exit status."""
    parser = Parser("reproduce", "Run a table or figure of a paper: plan, train, score, compare. Without ITEM: list all"
                    ". Repeat the command to continue after a stop.")  # fmt: skip
    parser.add_argument("item", nargs="?", metavar="ITEM", help="name of a table or figure, or a file like those in "
                        "configs/reproduce")  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="key=value", help="changes of settings of all runs")
    parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="tiny: two CPU cores, three hours")
    parser.add_argument("--plan", action="store_true", help="print what would be run, and stop")
    parser.add_argument("--data", type=path_argument, default=Path("data"), help="folder of all input data (data)")
    parser.add_argument("--senteval", type=path_argument, help="folder in SentEval's layout (DATA/senteval)")
    parser.add_argument("--work", type=path_argument, default=Path("runs/reproduce"), help="folder of shards, runs and "
                        "results (runs/reproduce)")  # fmt: skip
    parser.add_argument("--start", type=path_argument, metavar="FOLDER", help="encoder of transformers to start from, "
                        "in place of the start that the item trains; one --work for each")  # fmt: skip
    parser.add_argument("--seeds", type=seeds, metavar="0,1,...", help="seeds in place of the item's")
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="run the cells with this label; "
                        "repeat it for several")  # fmt: skip
    parser.shared("--allow-unchecked")
    options = parser.parse_intermixed_args(arguments)
    from declutr.reproduction.item import item_names, load_item

    if options.item is None:
        print("\n".join(f"{name:28s} {load_item(name).title}" for name in item_names()))
        return 0
    if second := next((word for word in options.settings if "=" not in word), None):
        return refused(f"{second}: a setting is written key=value, and a command runs one item")
    if options.data.is_file():
        return refused(f"--data {options.data}: is a file; name the folder of all input data")
    name, work, start = Path(options.item).stem, options.work.absolute(), options.start
    if start and not (start / "config.json").is_file():
        return refused(f"--start {start}: has no config.json; name the folder of an encoder of transformers")
    if problem := folder_problem(work):
        return refused(f"--work {work}: {problem}")
    item = load_item(options.item)
    from declutr.reproduction.plan import ItemPlan
    from declutr.reproduction.running import plan_lines, reproduce

    places = options.data, options.senteval or options.data / "senteval", work
    plan = ItemPlan(name, item, options.scale, *places, options.settings, options.seeds, start, options.only)
    print("\n".join(plan_lines(plan)), flush=True)
    if options.plan:
        return 0
    setup_logging("reproduce")
    print(f"\n{reproduce(plan, options.allow_unchecked, arguments)}")
    print(f"{plan.folder / plan.results}.md; also .json")
    return 0


def seeds(text: str) -> list[int]:
    """Seeds, separated by commas; the plan refuses equal or negative ones."""
    if {*text} - {*"-0123456789,"}:
        raise ArgumentTypeError(f"{text}: must be whole numbers, separated by commas, as in 0,1")
    return [int(word) for word in text.split(",")]
