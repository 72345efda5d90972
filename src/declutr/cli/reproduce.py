"""`declutr reproduce`."""

import argparse
from pathlib import Path

from declutr.common.console.terminal import refused
from declutr.common.paths import folder_problem, path_argument


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status.

    Raises:
        ConfigError: settings of the start do not fit its shards.
        RunLockedError: another command works in the folder.
    """
    options = _parser().parse_intermixed_args(arguments)
    from declutr.common.console.logs import setup_logging
    from declutr.reproduction.item import item_names, load_item

    if options.item is None:
        print("\n".join(f"{name:28s} {load_item(name).title}" for name in item_names()))
        return 0
    name, work, start = Path(options.item).stem, options.work.absolute(), options.start
    if start and not (start / "config.json").is_file():
        return refused(f"--start {start}: has no config.json; name the folder of an encoder of transformers")
    if problem := folder_problem(work):
        return refused(f"--work {work}: {problem}")
    from declutr.reproduction.plan import ItemPlan
    from declutr.reproduction.running import plan_lines, reproduce

    places = options.data, options.senteval or options.data / "senteval", work
    item = load_item(options.item)
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
    return [int(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="declutr reproduce",
        description="Run a table or figure of a paper: plan, train, score, compare. Without ITEM: list all. Repeat the "
        "command to continue after a stop.",
    )
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
    parser.add_argument("--allow-unchecked", action="store_true", help="score data other than the published ones")
    return parser
