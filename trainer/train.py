"""Entry: `declutr train CONFIG [key=value ...]`, or this file as a script (`ray submit cluster.yaml trainer/train.py`).

It starts Ray in a thread while it loads and checks everything else. The same command continues a run.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from declutr.common.relay import command_pid, end_at_signals, relay

if __name__ == "__main__":
    relay()  # before the imports below start threads
    end_at_signals()

# Ray prints a paragraph to stdout for every dead worker; our message is one line that names the worker
# (trainer/driver/failure.py). Ray's other messages stay. It reads this variable at its import, which comes later.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
# Processes that a local session starts ahead are of no use here: Ray Train starts its own, with other variables.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

from declutr.common.config import Settings, load_config
from declutr.common.config_docs import annotated_yaml
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import answered, config_parser
from declutr.common.errors import ConfigError, redact
from declutr.common.lock import refuse_held
from declutr.common.paths import expand
from declutr.common.stores.address import is_remote
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import place_problems, refuse, resolve
from declutr.trainer.driver.continuation import SUMMARY
from declutr.trainer.run import RunPlan, unknown


def _ray_in_thread(config: TrainConfig) -> threading.Thread | None:
    """A thread that starts Ray during loading and checks; None if the run is finished, or the caller has a session."""
    session = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if session or (not is_remote(config.run) and (expand(config.run) / SUMMARY).is_file()):
        return None

    def start() -> None:
        from declutr.common.session import start_ray

        with contextlib.suppress(Exception):  # the supervisor retries and reports the error
            start_ray(config.scaling.num_cpus, config.scaling.address)

    thread = threading.Thread(target=start, name="declutr-ray", daemon=True)
    get_logger().info("starting Ray while loading torch and transformers")
    thread.start()
    return thread


def train(settings: Settings[TrainConfig], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Trains an encoder to the last step, or continues a run that was stopped, and exports it.

    Args:
        settings: the section `train` as nested dictionaries, the path of a YAML file that has it, or its model.
        overrides: settings to change, as `key.sub=value`.

    Returns:
        The run's summary, as in its `summary.json` (`declutr.trainer.driver.run.run_training`): `export` is the folder
        of the encoder.

    Raises:
        ConfigError: with every problem found before Ray starts.
        ShardError, CheckpointError, DamagedError: files of the data or of the run cannot be used.
        TrainingFailedError: the run cannot continue; the message has the workers' reason.
        RunStoppedError: the process received a signal (Ctrl-C) or lost the run; the steps so far are saved.
        RunLockedError: another command works on the run folder.
    """
    config = load_config(settings, "train", TrainConfig, overrides, place_problems)
    return _train(config, _checked(config))


def _train(
    config: TrainConfig,
    plan: RunPlan | None,
    started: float | None = None,
    wait_for_ray: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Trains; the arguments are those of `run_training`."""
    from declutr.common.errors import TrainingFailedError
    from declutr.trainer.driver.run import run_training

    try:
        return run_training(config, started, wait_for_ray, plan)
    except OSError as error:  # a full disk or a lost storage; a continuation is promised if there may be checkpoints
        continues = is_remote(config.run) or (expand(config.run) / "checkpoints").is_dir()
        remedy = "checkpoints are kept, the same command continues" if continues else "nothing was trained"
        raise TrainingFailedError(f"{error}; {remedy}") from error


def _checked(config: TrainConfig) -> RunPlan | None:
    """The plan of the run, checked before torch, transformers and Ray are loaded; None if places are to be fetched.

    Raises:
        ConfigError: with every problem.
        RunLockedError: another command works on the run folder.
    """
    refuse(place_problems(config.model_dump()))
    if any(map(is_remote, (config.run, *_data_places(config)))):
        return None
    plan = resolve(config)
    refuse_held(plan.folder)
    return plan


def _began() -> float:
    """Start time of the command as Unix time; the current time without /proc."""
    try:
        ticks = int(Path(f"/proc/{command_pid()}/stat").read_text().rpartition(")")[2].split()[19])
        running_seconds = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return time.time()
    return time.time() - running_seconds


def _data_places(config: TrainConfig) -> list[str]:
    """Folders and addresses of all shards that a run reads."""
    validated = [config.validation.data] if config.validation.data else []
    return validated + [place for task in config.tasks().values() for place in task.places]


def _estimate(plan: RunPlan) -> str:
    """The text of `--plan`.

    Raises:
        ConfigError: problems of the run, or of its first steps.
    """
    from declutr.trainer.driver.estimate import plan_lines
    from declutr.trainer.step.gradcache import MicrobatchError
    from declutr.trainer.step.step import NonFiniteLossError
    from declutr.trainer.worker.device import refusal

    try:
        return "".join(f"{line}\n" for line in plan_lines(plan))
    except (NonFiniteLossError, MicrobatchError) as error:
        raise ConfigError("train --plan", [str(error)]) from error
    except RuntimeError as error:
        message = refusal(error)
        if message is None:
            raise
        raise ConfigError("train --plan", [message]) from error


@answered
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train CONFIG [key=value ...] [--print-config]`; returns the exit status."""
    parser = config_parser("train")
    arguments = parser.parse_intermixed_args(argv)
    setup_logging("train")
    # before loading torch and Ray, which takes many seconds on a busy machine
    config = load_config(arguments.config, "train", TrainConfig, arguments.overrides, place_problems)
    if arguments.print_config:
        printed_config = config
        if not any(map(is_remote, _data_places(config))):
            printed_config = RunPlan.of(config).config
        sys.stdout.write(annotated_yaml(printed_config))
        if left := unknown(printed_config):
            get_logger().warning(
                "data = %s: its shards cannot be read now. A run takes %s from them; the values shown are "
                "defaults, so remove them before you use this output as a config file",
                redact(", ".join(config.places)),
                ", ".join(left),
            )
        return 0
    plan = _checked(config)
    if arguments.plan:
        sys.stdout.write(_estimate(plan or resolve(config)))
        return 0
    early = None if config.scaling.local else _ray_in_thread(config)
    wait_for_ray: Callable[[], None] = early.join if early else lambda: None
    from declutr.trainer.driver.continuation import neighbours_of

    try:
        summary = _train(config, plan, _began(), None if config.scaling.local else wait_for_ray)
    finally:
        if early:  # also after a refused run
            early.join()
            import ray

            ray.shutdown()
    sys.stdout.write(f"{summary['run']}: {summary['steps']} steps in {summary['seconds']:.0f} s")
    sys.stdout.write(f", ended early: {summary['why']}" if summary["ended"] == "early" else "")
    sys.stdout.write("".join(f"; {sentence}" for sentence in (summary["verdict"]["sentence"], *neighbours_of(summary))))
    exported = "" if summary["exported_step"] == summary["steps"] else f" (step {summary['exported_step']})"
    sys.stdout.write(f"; encoder in {summary['export']}{exported}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
