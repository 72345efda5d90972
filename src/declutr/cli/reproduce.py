"""`declutr reproduce`."""

import argparse
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from declutr.common.config import ConfigError
from declutr.common.console.terminal import refused
from declutr.common.lock import RunLockedError, refuse_held
from declutr.common.overrides import apply_overrides
from declutr.common.paths import folder_problem, path_argument

if TYPE_CHECKING:
    from declutr.reproduction.plan import ItemPlan


def run(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    given = _parser().parse_intermixed_args(arguments)
    from declutr.pipeline.shards.manifest import ShardError
    from declutr.reproduction.item import ReproduceError, item_names, load_item
    from declutr.reproduction.plan import plan_item

    if given.item is None:
        print("\n".join(f"{name:28s} {load_item(name).title}" for name in item_names()))
        return 0
    changes, problems = _changes(given.settings)
    if problems:
        return refused(problems[0])
    try:
        name, work = Path(given.item).stem, given.work.absolute()
        if given.start and not (given.start / "config.json").is_file():
            return refused(f"--start {given.start}: has no config.json; name the folder of an encoder of transformers")
        item = load_item(given.item)
        senteval = given.senteval or given.data / "senteval"
        places = (given.data, senteval, work)
        plan = plan_item(name, item, given.scale, *places, changes, given.seeds, given.start, given.only)
        if problem := folder_problem(work):
            return refused(f"--work {work}: {problem}")
        if not given.plan:
            for folder in (work, plan.folder):
                refuse_held(folder)
        print("\n".join(plan.lines()), flush=True)
    except (ReproduceError, RunLockedError, ShardError) as error:
        return refused(error)
    return 0 if given.plan else _reproduce(given, plan, work, senteval, arguments)


def _changes(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by the keys of the words, and what is wrong with them."""
    tree: dict[str, Any] = {}
    problems = apply_overrides(tree, words)
    keys = [] if problems else [word.partition("=")[0] for word in words]
    return {key: reduce(getitem, key.split("."), tree) for key in keys}, problems


def _reproduce(given: argparse.Namespace, plan: "ItemPlan", work: Path, senteval: Path, arguments: list[str]) -> int:
    """Run what is left of the item."""
    from declutr.common.console.logs import setup_logging
    from declutr.common.storage import DamagedError
    from declutr.encoders.protocol import EncoderError
    from declutr.pipeline.shards.manifest import ShardError
    from declutr.reproduction.item import ReproduceError
    from declutr.reproduction.runner import reproduce
    from declutr.trainer.checkpoints.checkpoint import CheckpointError
    from declutr.trainer.driver.failure import TrainingFailedError
    from declutr.trainer.driver.signals import RunStoppedError, say_stopped

    setup_logging("reproduce")
    try:
        print(f"\n{reproduce(plan, work, senteval, given.allow_unchecked, arguments, _say)}")
    except ConfigError as error:
        return refused(f"{error.problems[0]} (of {len(error.problems)} problems)" if error.problems else error)
    except (
        *(ReproduceError, RunLockedError, ShardError, EncoderError),
        *(CheckpointError, DamagedError, TrainingFailedError),
    ) as error:
        return refused(error)
    except (KeyboardInterrupt, RunStoppedError) as reason:
        return say_stopped(reason)
    print(f"{plan.folder / plan.results}.md; also .json and .png")
    return 0


def _seeds(text: str) -> list[int]:
    """Distinct seeds, separated by commas."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: write different numbers from 0 on, separated by commas")
    return found


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


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
    parser.add_argument("--seeds", type=_seeds, metavar="0,1,...", help="seeds in place of the item's")
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="run the cells with this label; "
                        "repeat it for several")  # fmt: skip
    parser.add_argument("--allow-unchecked", action="store_true", help="score data other than the published ones")
    return parser
