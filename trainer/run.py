"""A training run from its folder to its export: what the command and the Python API share."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.address import is_remote
from common.config import expand, print_config
from common.logs import get_logger
from common.storage import read_json, write_json, write_text
from pipeline.shards import ShardSet
from trainer import checkpoint
from trainer.checks import DECISIVE, problems, refuse
from trainer.config import TrainConfig
from trainer.export import EXPORT, export
from trainer.failure import FAILURES
from trainer.lease import Lease
from trainer.lock import RunLock
from trainer.loop import CHECKPOINTS
from trainer.metrics import METRICS, read_last_step, read_metrics
from trainer.parts import total_steps
from trainer.plan import Plan
from trainer.progress import ProgressBar
from trainer.signals import Signals
from trainer.store import RunStore, data_folder, run_folder, store_of
from trainer.supervisor import Supervisor

SUMMARY = "summary.json"
_SECONDS = "seconds.json"
_FILES = (DECISIVE, METRICS, _SECONDS, FAILURES)  # that the driver reads or writes on in a run that goes on


def run_training(
    config: TrainConfig, begun: float | None = None, ray_is_there: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Trains to the last step, continuing what the run folder holds, and exports the encoder.

    Args:
        config: of the run.
        begun: when the command began (Unix time), where it is a command; for the log of its start.
        ray_is_there: waits for a Ray that starts meanwhile.

    Returns:
        The run's summary, as written to `summary.json`: final and initial scores, steps, seconds, export folder.

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
        refuse(problems(config))
        marks["checks"] = time.time()
        if ray_is_there:
            ray_is_there()
        stack.enter_context(signals)
        if not is_remote(config.run):
            _hold(config, signals, stack)
        return _train(config, run_folder(config), signals, marks)


def _hold(config: TrainConfig, signals: Signals, stack: contextlib.ExitStack) -> None:
    """Takes the run for this command; fetches its checkpoint and files, where they lie in a store."""

    def lost() -> None:
        signals.ask("the loss of the run's lock to another command")

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
    if store is not None:
        store.send("config.yaml", DECISIVE)
    shards = ShardSet(data_folder(config), "train")
    steps = total_steps(config, Plan(config.seed, shards.num_documents, config.batch_documents))
    latest = checkpoint.find_latest(run / CHECKPOINTS)
    if latest is not None:
        done = latest[1].step
        get_logger().info(
            "%s: %s", config.run, f"continuing after step {done} of {steps}" if done < steps else "finished already"
        )
    if latest is None or latest[1].step < steps:
        begun = time.monotonic()
        supervisor = Supervisor(located(config), run, steps, signals, marks)
        # a run at an address has its file on the first worker's host
        newest = partial(read_last_step, run / METRICS) if store is None else supervisor.newest
        try:
            with ProgressBar(newest, steps):
                supervisor.run_to_end()
        finally:
            _add_seconds(run, time.monotonic() - begun)
            if store is not None:
                _send_at_the_end(store)
        if store is not None:
            store.fetch()
    if store is not None and config.export == "best":
        store.fetch_best(config.validation.score)
    folder = export(config, run)
    where = str(folder) if store is None else store.send_folder(EXPORT)
    validations = [line for line in read_metrics(run) if line["kind"] == "validation"]
    summary = {
        "run": config.run,
        "steps": steps,
        "seconds": read_json(run / _SECONDS) if (run / _SECONDS).is_file() else 0.0,
        "export": where,
        "first_scores": _scores(validations[0]) if validations else {},
        "last_scores": _scores(validations[-1]) if validations else {},
    }
    write_json(run / SUMMARY, summary)
    if store is not None:
        store.send(SUMMARY)
    return summary


def _send_at_the_end(store: RunStore) -> None:
    """The driver's own files; also where the run failed."""
    try:
        store.send(_SECONDS, FAILURES)
    except OSError as error:  # why the run ended is what must be said
        get_logger().warning("%s", error)


def located(config: TrainConfig) -> TrainConfig:
    """The configuration with absolute paths: workers run in a folder of their own."""
    given = {key: getattr(config, key) for key in ("run", "data")}
    update: dict[str, Any] = {key: str(expand(v).absolute()) for key, v in given.items() if not is_remote(v)}
    pretrained = config.encoder.pretrained
    if pretrained is not None and expand(pretrained).is_dir():
        update["encoder"] = config.encoder.model_copy(update={"pretrained": str(expand(pretrained).absolute())})
    return config.model_copy(update=update)


def _scores(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name not in ("kind", "step", "time")}


def _add_seconds(run: Path, seconds: float) -> None:
    path = run / _SECONDS
    try:
        write_json(path, round((read_json(path) if path.is_file() else 0.0) + seconds, 3))
    except OSError as error:  # why the run ended is what must be said
        get_logger().warning("%s cannot be written (%s)", path, error.strerror)
