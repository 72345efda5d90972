"""Entry: `declutr train CONFIG [key=value ...]`, or this file as a script (`ray submit cluster.yaml trainer/train.py`).

Checks everything that can be checked, builds the TorchTrainer, watches it, exports. The same command continues a run.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import ConfigError, expand, load_config, print_config
from common.logs import get_logger, setup_logging
from common.storage import read_json, write_json, write_text
from pipeline.shards import ShardError, ShardSet
from trainer import checkpoint
from trainer.checks import DECISIVE, problems, refuse
from trainer.config import TrainConfig
from trainer.export import export
from trainer.fork import fork
from trainer.lock import RunLock, RunLockedError
from trainer.loop import CHECKPOINTS
from trainer.metrics import read_metrics
from trainer.parts import total_steps
from trainer.plan import Plan
from trainer.progress import ProgressBar
from trainer.signals import Signals
from trainer.supervisor import RunStoppedError, Supervisor, TrainingFailedError

SUMMARY = "summary.json"


def train(config: TrainConfig, begun: float | None = None) -> dict[str, Any]:
    """Trains to the last step, continuing what the run folder holds, and exports the encoder.

    Args:
        config: of the run.
        begun: when the command began (Unix time), where it is a command; for the log of its start.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, steps, seconds, export folder.

    Raises:
        ConfigError: with every problem found before Ray starts.
        TrainingFailedError: the run cannot go on, with the workers' reason.
        RunStoppedError: SIGTERM or SIGINT came; what was done is saved.
        RunLockedError: another command works on the run folder.
    """
    marks = {"command": begun, "imports": time.time()} if begun else {"command": time.time()}
    refuse(problems(config))
    marks["checks"] = time.time()
    run = expand(config.run).absolute()
    run.mkdir(parents=True, exist_ok=True)
    with Signals() as signals, RunLock(run, lambda: signals.ask("the loss of the run's lock to another command")):
        return _train(config, run, signals, marks)


def _train(config: TrainConfig, run: Path, signals: Signals, marks: dict[str, float]) -> dict[str, Any]:
    write_text(run / "config.yaml", print_config(config))
    write_json(run / DECISIVE, config.decisive())
    shards = ShardSet(expand(config.data), "train")
    steps = total_steps(config, Plan(config.seed, shards.num_documents, config.batch_documents))
    latest = checkpoint.find_latest(run / CHECKPOINTS)
    if latest is not None:
        done = latest[1].step
        get_logger().info(
            "%s: %s", run, f"continuing after step {done} of {steps}" if done < steps else "finished already"
        )
    if latest is None or latest[1].step < steps:
        begun = time.monotonic()
        try:
            with ProgressBar(run, steps):
                Supervisor(located(config), run, steps, signals, marks).run_to_end()
        finally:
            _add_seconds(run, time.monotonic() - begun)
    folder = export(config, run)
    validations = [line for line in read_metrics(run) if line["kind"] == "validation"]
    summary = {
        "run": config.run,
        "steps": steps,
        "seconds": read_json(run / "seconds.json"),
        "export": str(folder),
        "first_scores": _scores(validations[0]) if validations else {},
        "last_scores": _scores(validations[-1]) if validations else {},
    }
    write_json(run / SUMMARY, summary)
    return summary


def located(config: TrainConfig) -> TrainConfig:
    """The configuration with absolute paths: workers run in a folder of their own."""
    update: dict[str, Any] = {key: str(expand(getattr(config, key)).absolute()) for key in ("run", "data")}
    pretrained = config.encoder.pretrained
    if pretrained is not None and expand(pretrained).is_dir():
        update["encoder"] = config.encoder.model_copy(update={"pretrained": str(expand(pretrained).absolute())})
    return config.model_copy(update=update)


def _scores(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("kind", "step", "time")}


def _add_seconds(run: Path, seconds: float) -> None:
    path = run / "seconds.json"
    before = read_json(path) if path.is_file() else 0.0
    write_json(path, round(before + seconds, 3))


def _began() -> float:
    """When this process began, as Unix time; now, where there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        running_seconds = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return time.time()
    return time.time() - running_seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="train", description="From shards to a sentence encoder.")
    parser.add_argument("config", help="YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--fork", metavar="NEW_RUN", help="begin a new run with the old one's weights and step")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and stop")
    arguments = parser.parse_args(argv)
    setup_logging("train")
    try:
        config = load_config(arguments.config, "train", TrainConfig, arguments.overrides)
        if arguments.print_config:
            sys.stdout.write(print_config(config))
            return 0
        if arguments.fork:
            config = fork(config, arguments.fork)
        summary = train(config, _began())
    except (ConfigError, ShardError, TrainingFailedError, RunLockedError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except RunStoppedError as stopped:
        sys.stderr.write(f"{stopped}\n")
        return stopped.status
    scores = ", ".join(f"{name} {value:.4f}" for name, value in summary["last_scores"].items())
    sys.stdout.write(f"{summary['run']}: {summary['steps']} steps in {summary['seconds']:.0f} s")
    sys.stdout.write(f"; held-out {scores}" if scores else "")
    sys.stdout.write(f"; encoder in {summary['export']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
