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

# Ray reads these when it starts: reports are otherwise answered every 2 s only, and each costs as much.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from common.config import ConfigError, expand, load_config, print_config
from common.logs import get_logger, setup_logging
from common.storage import read_json, write_json, write_text
from pipeline.session import start_ray
from pipeline.shards import ShardError, ShardSet
from trainer import checkpoint
from trainer.checks import DECISIVE, problems, refuse
from trainer.config import TrainConfig
from trainer.export import export
from trainer.loop import CHECKPOINTS, train_loop
from trainer.metrics import read_metrics
from trainer.parts import total_steps
from trainer.plan import Plan
from trainer.progress import ProgressBar

SUMMARY = "summary.json"


class TrainingFailedError(RuntimeError):
    """The run stopped before its last step; what was saved is kept, the same command continues."""


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains to the last step, continuing what the run folder holds, and exports the encoder.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, steps, seconds, export folder.

    Raises:
        ConfigError: with every problem found before Ray starts.
        TrainingFailedError: the workers failed more often than `scaling.max_failures`, or a loss is not finite.
    """
    refuse(problems(config))
    run = expand(config.run).absolute()
    run.mkdir(parents=True, exist_ok=True)
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
        fit(config, run, steps)
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


def fit(config: TrainConfig, run: Path, steps: int) -> None:
    """Runs the worker group until the last step.

    Raises:
        TrainingFailedError: with the workers' own error.
    """
    scaling = config.scaling
    # A worker and the tasks that read for it must all find a CPU, or they wait for each other without a word.
    needed = scaling.workers * scaling.cpus_per_worker + scaling.storage_threads
    start_ray(max(needed, os.cpu_count() or 1), scaling.address)
    resources = ray.cluster_resources()
    if resources.get("CPU", 0) < needed:
        get_logger().warning("the cluster has %g CPUs, this run needs %d: it waits", resources.get("CPU", 0), needed)
    gpus = resources.get("GPU", 0)
    use_gpu = scaling.device == "cuda" or (scaling.device == "auto" and gpus >= scaling.workers)
    # Ray's own record of checkpoints only knows those of one driver; ours are found by looking at the folder.
    (run / CHECKPOINTS / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"config": located(config).model_dump(mode="json")},
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.workers,
            use_gpu=use_gpu,
            resources_per_worker={"CPU": scaling.cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
        ),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            storage_path=str(run),
            failure_config=ray.train.FailureConfig(max_failures=scaling.max_failures),
        ),
    )
    with ProgressBar(run, steps):
        try:
            result = trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise TrainingFailedError(
                f"{error}\nWhat was saved is in {run / CHECKPOINTS}; the same command continues"
            ) from error
    if result.return_value is not None:
        raise TrainingFailedError(f"{result.return_value}. What was saved before is in {run / CHECKPOINTS}")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="train", description="From shards to a sentence encoder.")
    parser.add_argument("config", help="YAML file with a `train` section")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of that section to change")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and stop")
    arguments = parser.parse_args(argv)
    setup_logging("train")
    try:
        config = load_config(arguments.config, "train", TrainConfig, arguments.overrides)
        if arguments.print_config:
            sys.stdout.write(print_config(config))
            return 0
        summary = train(config)
    except (ConfigError, ShardError, TrainingFailedError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    scores = ", ".join(f"{name} {value:.4f}" for name, value in summary["last_scores"].items())
    sys.stdout.write(f"{summary['run']}: {summary['steps']} steps in {summary['seconds']:.0f} s")
    sys.stdout.write(f"; held-out {scores}" if scores else "")
    sys.stdout.write(f"; encoder in {summary['export']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
