"""A training run from its folder to its export: what the command and the Python API share."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from common.config import print_config
from common.console.logs import get_logger
from common.lock import RunLock
from common.paths import expand
from common.records import DamagedError, Record, read_record
from common.scores import SCORES
from common.storage import write_json, write_text
from common.stores.address import is_remote
from common.stores.retry import RetryPolicy
from pipeline.shards.shards import ShardSet
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CHECKPOINTS, CheckpointError
from trainer.checkpoints.ranking import FOLLOWED, Standing, history
from trainer.checkpoints.store import RunStore, store_of
from trainer.data.plan import Plan
from trainer.driver.begun import as_begun
from trainer.driver.checks import DECISIVE, problems, ray_problems, refuse
from trainer.driver.export import EXPORT, export, read_settings
from trainer.driver.failure import FAILURES
from trainer.driver.lease import Lease
from trainer.driver.progress import ProgressBar
from trainer.driver.signals import Signals
from trainer.driver.supervisor import Supervisor
from trainer.driver.waiting import crowded
from trainer.metrics.metrics import read_metrics
from trainer.setup.build import total_steps
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import TrainConfig

SUMMARY = "summary.json"
SECONDS = "seconds.json"
_FILES = ("config.yaml", DECISIVE, SECONDS, FAILURES, SUMMARY)  # of a run, written by its driver


def run_training(
    config: TrainConfig, begun: float | None = None, ray_is_there: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Trains to the last step, continuing what the run folder holds, and exports the encoder.

    Args:
        config: of the run.
        begun: when the command began (Unix time), where it is a command; for the log of its start.
        ray_is_there: waits for a Ray that starts meanwhile.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, the last step and why it was the last
        (`ended`: "last step", or "early" with `why` and `patience`), seconds, the export and the step of its weights.

    Raises:
        ConfigError: with every problem found before Ray starts.
        TrainingFailedError: the run cannot go on, with the workers' reason.
        RunStoppedError: SIGTERM or SIGINT came; what was done is saved.
        RunLockedError: another command works on the run folder.
    """
    marks = {"command": begun, "imports": time.time()} if begun else {"command": time.time()}
    signals = Signals()
    with contextlib.ExitStack() as stack:
        if is_remote(config.run):  # what is there must be here before it can be judged
            _hold(config, signals, stack)
        config = _keep_score(config)
        refuse([*problems(config), *ray_problems(config, run_folder(config), ray_is_there is not None)])
        marks["checks"] = time.time()
        if ray_is_there:
            ray_is_there()
        stack.enter_context(signals)
        if not is_remote(config.run):
            _hold(config, signals, stack)
        return _train(config, run_folder(config), signals, marks)


def _keep_score(config: TrainConfig) -> TrainConfig:
    """The configuration with the score that the run began with; a score that is not today's default is logged."""
    begun = as_begun(config, run_folder(config))
    if begun.validation.score != config.validation.score:
        get_logger().info(
            "%s: began with validation.score = %s and keeps it; a new run has %s by default",
            *(config.run, begun.validation.score, config.validation.score),
        )
    return begun


def _hold(config: TrainConfig, signals: Signals, stack: contextlib.ExitStack) -> None:
    """Takes the run for this command; fetches its checkpoint and files, where they lie in a store."""

    def lost() -> None:
        signals.ask("the loss of the run's lock to another command, or of its folder")

    run, store = run_folder(config), store_of(config)
    run.mkdir(parents=True, exist_ok=True)
    stack.enter_context(RunLock(run, lost))
    if store is not None:
        stack.enter_context(Lease(config.run, lost))
        store.fetch(_FILES)


def _train(config: TrainConfig, run: Path, signals: Signals, marks: dict[str, float]) -> dict[str, Any]:
    store = store_of(config)
    write_text(run / "config.yaml", print_config(config))
    write_json(run / DECISIVE, config.decisive())
    shards = ShardSet(data_folder(config), "train")
    steps = total_steps(config, Plan(config.seed, shards.num_documents, config.batch_documents))
    latest = checkpoint.find_latest(run / CHECKPOINTS)
    done = 0 if latest is None else latest[1].step
    if latest is not None and done > steps:
        raise CheckpointError(
            f"{latest[0]}: step {done} lies beyond the run's last step {steps}; delete this checkpoint"
        )
    early = ended_early(run, config, done) if done < steps else None
    if early:
        get_logger().info("%s: finished already, early: %s; a larger patience goes on", config.run, early["why"])
    elif latest is not None:
        told = f"continuing after step {done} of {steps}" if done < steps else "finished already"
        get_logger().info("%s: %s", config.run, told)
    if done < steps and early is None:
        (run / SUMMARY).unlink(missing_ok=True)  # of an end that is none any more
        if config.validation.score == FOLLOWED and not (run / SCORES).is_file():
            get_logger().info("scores are expected from `declutr evaluate --follow %s`, beside this", config.run)
        if store is not None:
            store.send(*_FILES)
        if sentence := crowded(config.scaling):
            get_logger().warning("%s", sentence)
        begun = time.monotonic()
        supervisor = Supervisor(located(config), run, steps, signals, marks)
        try:
            with ProgressBar(lambda: supervisor.line, steps):
                done = supervisor.run_to_end()
        finally:
            _add_seconds(run, time.monotonic() - begun)
            if store is not None:  # whoever told the run to stop will not wait ten minutes for a store that is away
                hurried = RetryPolicy(total_seconds=config.scaling.stop_seconds)
                _send_at_the_end(store if signals.received is None else RunStore(config.run, run, hurried))
        if store is not None:
            store.fetch()
        if done < steps:
            now = Standing.of(history(run, config.validation.score, done))
            early = {"why": now.told(config.validation) if now else "", "patience": config.validation.patience}
            get_logger().info("%s: ended early after step %d of %d: %s", run, done, steps, early["why"])
    if store is not None and config.export == "best":
        store.fetch_best(config.validation.score)
    folder = export(config, run)
    validations = [line for line in read_metrics(run) if line["kind"] == "validation"]
    summary = {
        "run": config.run,
        "steps": done,
        "ended": "early" if early else "last step",
        **(early or {}),
        "seconds": _seconds(run),
        "export": str(folder) if store is None else store.send_folder(EXPORT),
        "exported_step": read_settings(folder).step,
        "first_scores": _scores(validations[0]) if validations else {},
        "last_scores": _scores(validations[-1]) if validations else {},
    }
    write_json(run / SUMMARY, summary)
    if store is not None:
        store.send(*_FILES)
    return summary


def _send_at_the_end(store: RunStore) -> None:
    """The driver's own files; also where the run failed."""
    try:
        store.send(*_FILES)
    except OSError as error:  # why the run ended is what must be said
        get_logger().warning("%s", error)


def located(config: TrainConfig) -> TrainConfig:
    """The configuration with absolute paths: workers run in a folder of their own."""
    given = {key: getattr(config, key) for key in ("run", "data")}
    update: dict[str, Any] = {key: str(expand(at).absolute()) for key, at in given.items() if not is_remote(at)}
    pretrained = config.encoder.pretrained
    if pretrained is not None and expand(pretrained).is_dir():
        update["encoder"] = config.encoder.model_copy(update={"pretrained": str(expand(pretrained).absolute())})
    return config.model_copy(update=update)


def ended_early(run: Path, config: TrainConfig, done: int) -> dict[str, Any] | None:
    """Why and with what patience a run has ended early; None: it has not, or shall have more patience now."""
    before = _read(run / SUMMARY, _Ended)
    patience = config.validation.patience
    if before is None or before.ended != "early" or before.steps != done:
        return None
    if patience is None or patience > before.patience:
        return None
    return {"why": before.why, "patience": before.patience}


class _Ended(msgspec.Struct, frozen=True):
    """The part of a summary that is read back."""

    ended: str
    steps: int
    why: str = ""
    patience: int = 0


def _read(path: Path, kind: type[Record]) -> Record | None:
    """A file that the run can do without; None where it is missing or, which is logged, damaged."""
    try:
        return read_record(path, kind)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        get_logger().warning("%s; continuing without it", error)
        return None


def _scores(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("kind", "step", "time")}


def _seconds(run: Path) -> float:
    """Seconds that all commands of a run have trained."""
    return _read(run / SECONDS, float) or 0.0


def _add_seconds(run: Path, seconds: float) -> None:
    path = run / SECONDS
    if not run.is_dir():  # renamed or deleted meanwhile: a new folder would look like the run
        return
    try:
        write_json(path, round(_seconds(run) + seconds, 3))
    except OSError as error:  # why the run ended is what must be said
        get_logger().warning("%s cannot be written (%s)", path, error.strerror)
