"""Entry: `declutr train CONFIG [key=value ...]`, or this file as a script (`ray submit cluster.yaml trainer/train.py`).

It starts Ray in a thread while it loads and checks everything else, and leads a run from its folder to its export. The
same command continues a run.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from declutr.common.relay import command_pid, end_at_signals, relay

if __name__ == "__main__":
    relay()  # before the imports below start threads
    end_at_signals()

# Ray prints a paragraph to stdout for every dead worker; our message is one line that names the worker
# (trainer/driver/failure.py). Ray's other messages stay. It reads this variable at its import, which comes later.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
# Processes that a local session starts ahead are of no use here: Ray Train starts its own, with other variables.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

from declutr.common.cluster import in_session
from declutr.common.config import Settings, config_yaml, load_config
from declutr.common.config_docs import annotated_yaml
from declutr.common.console.logs import get_logger, setup_logging
from declutr.common.console.terminal import answered, config_parser
from declutr.common.errors import CheckpointError, ConfigError, TrainingFailedError, redact
from declutr.common.lock import RunLock, StoreLock, refuse_held
from declutr.common.paths import expand
from declutr.common.storage import atomic_folder, write_json, write_text
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, early_end, history
from declutr.trainer.checkpoints.state import EXPORT, read_settings
from declutr.trainer.checkpoints.store import RunStore, store_of
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import (
    corpora_remarks,
    load_problems,
    place_problems,
    refuse,
    resolve,
    validation_remarks,
)
from declutr.trainer.driver.continuation import (
    RUN_FILES,
    SUMMARY,
    add_seconds,
    crowd_problems,
    ended_early,
    first_and_last_scores,
    neighbours_of,
    other_checkpoints,
    ray_problems,
    read_seconds,
)
from declutr.trainer.metrics.loggers import ProgressBar
from declutr.trainer.run import DEVICE, RESUME_SETTINGS, RunPlan, run_folder, unknown

if TYPE_CHECKING:  # loads Ray, which no refused run waits for
    from declutr.trainer.driver.supervisor import Signals


def _start_ray_aside(config: TrainConfig) -> threading.Event | None:
    """Starts Ray meanwhile; the event: it has started or failed. None if the run is finished, or there is a session."""
    if in_session() or (not is_remote(config.run) and (expand(config.run) / SUMMARY).is_file()):
        return None

    # Not the thread's `join`: one that a signal interrupts marks the thread as ended, and Ray would be shut down while
    # it starts.
    tried = threading.Event()

    def start() -> None:
        from declutr.common.session import start_ray

        try:
            with contextlib.suppress(Exception):  # the supervisor retries and reports the error
                start_ray(config.scaling.num_cpus, config.scaling.address)
        finally:
            tried.set()

    get_logger().info("starting Ray while loading torch and transformers")
    threading.Thread(target=start, name="declutr-ray", daemon=True).start()
    return tried


def train(settings: Settings[TrainConfig], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Trains an encoder to the last step, or continues a run that was stopped, and exports it.

    Args:
        settings: the section `train` as nested dictionaries, the path of a YAML file that has it, or its model.
        overrides: settings to change, as `key.sub=value`.

    Returns:
        The run's summary, as in its `summary.json` (`run_training`): `export` is the folder of the encoder.

    Raises:
        ConfigError: with every problem found before Ray starts.
        ShardError, CheckpointError, DamagedError: files of the data or of the run cannot be used.
        TrainingFailedError: the run cannot continue; the message has the workers' reason.
        RunStoppedError: the process received a signal (Ctrl-C) or lost the run; the steps so far are saved.
        RunLockedError: another command works on the run folder.
    """
    config = load_config(settings, "train", TrainConfig, overrides, place_problems)
    return run_training(config, plan=_checked(config))


def run_training(
    config: TrainConfig,  # of the run
    # start time of the command (Unix time), for the log of its start; None: called from Python.
    started: float | None = None,
    wait_for_ray: Callable[[], object] | None = None,  # waits until a Ray that is starting in a thread is ready
    plan: RunPlan | None = None,  # `resolve(config)`, if the caller has it
) -> dict[str, Any]:
    """Trains to the last step, continuing from the run folder's newest checkpoint, and exports the encoder.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, the last step and the reason it was
        the last (`ended`: "last step", or "early" with `why` and `patience`), seconds, the export and the step of its
        weights.
    """
    from declutr.trainer.driver.supervisor import Signals

    began = started or time.time()
    signals = Signals()
    try:
        with contextlib.ExitStack() as stack:
            if is_remote(config.run):  # the checks need the run's files on this host
                _lock_and_fetch(config, signals, stack)
            plan = plan or resolve(config)
            before, after = config.spans.model_dump(), plan.config.spans.model_dump()
            if changed := [f"spans.{key} = {value}" for key, value in after.items() if value != before[key]]:
                get_logger().info("%s: taken from the shards or the started run", ", ".join(changed))
            refuse([*load_problems(plan), *ray_problems(config.scaling, plan.folder, wait_for_ray is not None)])
            if wait_for_ray:
                import ray.train.torch  # noqa: F401 - loads torch while Ray starts

                wait_for_ray()
            stack.enter_context(signals)
            if not is_remote(config.run):
                _lock_and_fetch(config, signals, stack)
                refuse(other_checkpoints(plan))  # of a command that has ended since the checks
            return _train_and_export(plan, signals, began)
    except OSError as error:  # a full disk or a lost storage; a continuation is promised if there may be checkpoints
        continues = is_remote(config.run) or (expand(config.run) / CHECKPOINTS).is_dir()
        remedy = "checkpoints are kept, the same command continues" if continues else "nothing was trained"
        raise TrainingFailedError(f"{error}; {remedy}") from error


def _lock_and_fetch(config: TrainConfig, signals: "Signals", stack: contextlib.ExitStack) -> None:
    """Locks the run for this command and, for a run in a store, fetches its checkpoint and files."""

    def lost() -> None:
        signals.request_stop("the loss of the run's lock to another command, or of its folder")

    run = run_folder(config.run, config.cache)
    run.mkdir(parents=True, exist_ok=True)
    stack.enter_context(RunLock(run, lost))
    if store := store_of(config.run, run):
        stack.enter_context(StoreLock(Folder(config.run), lost))
        store.fetch((*RUN_FILES, DEVICE))


def _train_and_export(plan: RunPlan, signals: "Signals", began: float) -> dict[str, Any]:
    config, run = plan.config, plan.folder
    store = store_of(config.run, run)
    steps, ended = plan.total_steps, (run / SUMMARY).is_file()
    newest = max(checkpoint.steps_in(run / CHECKPOINTS), default=0)
    # Of a run that continues, the first worker verifies the checkpoint; here its bytes would only be read twice.
    latest = checkpoint.find_latest(run / CHECKPOINTS, verify=ended or newest >= steps)
    done = 0 if latest is None else latest[1].step
    if done == 0 and ended:  # the steps of a finished run are not taken again
        raise CheckpointError(
            f"{run}: has finished ({SUMMARY}), and no whole checkpoint is in {CHECKPOINTS}: the run would begin again "
            "and replace its results; name another folder, or delete this one"
        )
    write_text(run / "config.yaml", config_yaml(config))
    write_json(run / RESUME_SETTINGS, config.resume_settings())
    # readers of the run open no address that it names
    if is_remote(config.places[0]):
        with atomic_folder(run / TOKENIZER, replace=True) as aside:
            shutil.copytree(plan.data[""][0] / TOKENIZER, aside, dirs_exist_ok=True)
    if latest is not None and done > steps:
        raise CheckpointError(f"{latest[0]}: step {done} is beyond the run's last step {steps}; delete this checkpoint")
    early = ended_early(run, config.validation.patience, done) if done < steps else None
    if early:
        get_logger().info(
            "%s: already stopped early: %s; increase validation.patience to continue", config.run, early["why"]
        )
    elif latest is not None:
        whole = "" if ended else ", if its checkpoint is whole"  # the first worker verifies it
        message = f"continuing after step {done} of {steps}{whole}" if done < steps else "finished already"
        get_logger().info("%s: %s", config.run, message)
    if done < steps and early is None:
        (run / SUMMARY).unlink(missing_ok=True)  # describes an earlier end
        if store is not None:
            store.send(*RUN_FILES)
            if (run / TOKENIZER).is_dir():
                store.send_folder(TOKENIZER)
        for sentence in (*validation_remarks(plan), *corpora_remarks(plan, steps)):
            get_logger().warning("%s", sentence)
        from declutr.trainer.driver.supervisor import Supervisor

        training_since = time.monotonic()
        workers = Supervisor(plan, signals, began, store)
        try:
            rows = "docs" if plan.manifest.noun == "documents" else "rows"
            terms = [
                f"{name}_{term}" if name else term
                for name, task in plan.tasks.items()
                for term in task.objective.metrics
            ]
            with ProgressBar(lambda: workers.line, steps, terms, rows, done):
                done = workers.run_to_end()
        finally:
            add_seconds(run, time.monotonic() - training_since)
            if store is not None:  # after a signal, do not wait ten minutes for a store that does not answer
                hurried = Folder(config.run, config.scaling.shutdown_grace_seconds)
                try:
                    (store if signals.received is None else RunStore(hurried, run)).send(*RUN_FILES)
                except OSError as error:  # must not hide the reason why the run ended
                    get_logger().warning("%s", error)
        if store is not None:
            store.fetch()
        if done < steps:
            score, patience = config.validation.score, config.validation.patience
            early = {"why": early_end(history(run, score, done), score, patience) or "", "patience": patience}
            get_logger().info("%s: ended early after step %d of %d: %s", run, done, steps, early["why"])
    if store is not None and config.export == "best":
        store.fetch_best(config.validation.score)
    from declutr.trainer.driver.export import export  # loads torch and transformers, which no start waits for

    folder = export(plan, done)
    exported = read_settings(folder)
    summary = {
        "run": config.run,
        "steps": done,
        "ended": "early" if early else "last step",
        **(early or {}),
        "seconds": read_seconds(run),
        "export": str(folder) if store is None else store.send_folder(EXPORT),
        "exported_step": exported.step,
        "verdict": exported.verdict,
        **first_and_last_scores(run),
    }
    write_json(run / SUMMARY, summary)
    if store is not None:
        store.send(*RUN_FILES)
    return summary


def _checked(config: TrainConfig, starts: bool = True) -> RunPlan | None:
    """The plan of the run, checked before torch, transformers and Ray are loaded; None if places are to be fetched."""
    refuse(place_problems(config.model_dump()))
    if any(map(is_remote, (config.run, *_data_places(config)))):
        return None
    plan = resolve(config)
    refuse_held(plan.folder)
    refuse(crowd_problems(config.scaling, plan.folder) if starts and not in_session() else [])
    return plan


def _data_places(config: TrainConfig) -> list[str]:
    """Folders and addresses of all shards that a run reads."""
    validated = [config.validation.data] if config.validation.data else []
    return validated + [place for task in config.tasks().values() for place in task.places]


def _estimate(plan: RunPlan) -> str:
    """The text of `--plan`."""
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
    arguments = config_parser("train").parse_intermixed_args(argv)
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
    plan = _checked(config, starts=not arguments.plan)  # a plan may be of a larger machine
    if arguments.plan:
        sys.stdout.write(_estimate(plan or resolve(config)))
        return 0
    early = None if config.scaling.local else _start_ray_aside(config)
    wait_for_ray: Callable[[], object] = early.wait if early else lambda: None
    try:
        began = float(psutil.Process(command_pid()).create_time())  # of the command, as Unix time
        summary = run_training(config, began, None if config.scaling.local else wait_for_ray, plan)
    finally:
        if early:  # also after a refused run
            early.wait()
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
