"""A training run from its folder to its export, for the command and the Python API."""

import contextlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from declutr.common.config import config_yaml
from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError
from declutr.common.lock import RunLock, StoreLock
from declutr.common.storage import atomic_folder, write_json, write_text
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.ranking import BestScore, history
from declutr.trainer.checkpoints.state import EXPORT, read_settings
from declutr.trainer.checkpoints.store import RunStore, store_of
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import (
    corpora_remarks,
    load_problems,
    ray_problems,
    refuse,
    resolve,
    validation_remarks,
)
from declutr.trainer.driver.continuation import (
    DEVICE,
    FAILURES,
    SECONDS,
    SUMMARY,
    add_seconds,
    choose_device,
    ended_early,
    first_and_last_scores,
    other_checkpoints,
    read_seconds,
    refuse_lost_steps,
)
from declutr.trainer.driver.supervisor import Signals, Supervisor
from declutr.trainer.metrics.loggers import ProgressBar
from declutr.trainer.run import RESUME_SETTINGS, RunPlan, run_folder

if TYPE_CHECKING:
    from declutr.trainer.driver.local import LocalRun

_FILES = ("config.yaml", RESUME_SETTINGS, DEVICE, SECONDS, FAILURES, SUMMARY)  # written by the driver of a run


def run_training(
    config: TrainConfig,
    started: float | None = None,
    wait_for_ray: Callable[[], None] | None = None,
    plan: RunPlan | None = None,
) -> dict[str, Any]:
    """Trains to the last step, continuing from the run folder's newest checkpoint, and exports the encoder.

    Args:
        config: of the run.
        started: start time of the command (Unix time), for the log of its start; None: called from Python.
        wait_for_ray: waits until a Ray that is starting in a thread is ready.
        plan: `resolve(config)`, if the caller has it.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, the last step and the reason it was
        the last (`ended`: "last step", or "early" with `why` and `patience`), seconds, the export and the step of its
        weights.

    Raises:
        ConfigError: with every problem found before Ray starts.
        TrainingFailedError: the run cannot continue; the message has the workers' reason.
        RunStoppedError: the process received a signal or lost the run; the steps so far are saved.
        RunLockedError: another command works on the run folder.
    """
    began = started or time.time()
    signals = Signals()
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
        return _train(plan, signals, began)


def _lock_and_fetch(config: TrainConfig, signals: Signals, stack: contextlib.ExitStack) -> None:
    """Locks the run for this command and, for a run in a store, fetches its checkpoint and files."""

    def lost() -> None:
        signals.request_stop("the loss of the run's lock to another command, or of its folder")

    run = run_folder(config.run, config.cache)
    run.mkdir(parents=True, exist_ok=True)
    stack.enter_context(RunLock(run, lost))
    if store := store_of(config.run, run):
        stack.enter_context(StoreLock(Folder(config.run), lost))
        store.fetch(_FILES)


def _train(plan: RunPlan, signals: Signals, began: float) -> dict[str, Any]:
    config, run = plan.config, plan.folder
    store = store_of(config.run, run)
    latest = checkpoint.find_latest(run / CHECKPOINTS)
    done = 0 if latest is None else latest[1].step
    refuse_lost_steps(run, done)
    write_text(run / "config.yaml", config_yaml(config))
    write_json(run / RESUME_SETTINGS, config.resume_settings())
    # readers of the run open no address that it names
    if is_remote(config.places[0]):
        with atomic_folder(run / TOKENIZER, replace=True) as aside:
            shutil.copytree(plan.data[""][0] / TOKENIZER, aside, dirs_exist_ok=True)
    steps = plan.total_steps
    if latest is not None and done > steps:
        raise CheckpointError(f"{latest[0]}: step {done} is beyond the run's last step {steps}; delete this checkpoint")
    early = ended_early(run, config.validation.patience, done) if done < steps else None
    if early:
        get_logger().info(
            "%s: already stopped early: %s; increase validation.patience to continue", config.run, early["why"]
        )
    elif latest is not None:
        message = f"continuing after step {done} of {steps}" if done < steps else "finished already"
        get_logger().info("%s: %s", config.run, message)
    if done < steps and early is None:
        (run / SUMMARY).unlink(missing_ok=True)  # describes an earlier end
        if store is not None:
            store.send(*_FILES)
            if (run / TOKENIZER).is_dir():
                store.send_folder(TOKENIZER)
        for sentence in (*validation_remarks(plan), *corpora_remarks(plan, steps)):
            get_logger().warning("%s", sentence)
        training_since = time.monotonic()
        workers = _workers(plan, signals, began, store)
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
                    (store if signals.received is None else RunStore(hurried, run)).send(*_FILES)
                except OSError as error:  # must not hide the reason why the run ended
                    get_logger().warning("%s", error)
        if store is not None:
            store.fetch()
        if done < steps:
            now = BestScore.of(history(run, config.validation.score, done))
            early = {
                "why": now.reason(config.validation.score, config.validation.patience) if now else "",
                "patience": config.validation.patience,
            }
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
        store.send(*_FILES)
    return summary


def _workers(plan: RunPlan, signals: Signals, began: float, store: RunStore | None) -> "Supervisor | LocalRun":
    """The supervisor of the run's worker group; without Ray, the run in this process."""
    arguments = plan, signals, began, partial(choose_device, plan.config.scaling, plan.folder, store)
    if plan.config.scaling.local:
        from declutr.trainer.driver.local import LocalRun  # loads torch, which a driver of a group does not need

        return LocalRun(*arguments)
    return Supervisor(*arguments)
