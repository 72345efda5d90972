"""TensorBoard, Weights & Biases and a progress bar: views of metrics. None of them can stop a run or make it wait."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from declutr.common.console.logs import bar, get_logger
from declutr.common.errors import DamagedError, missing_extra
from declutr.common.storage import hash_json, read_record, write_json
from declutr.common.watcher import Watcher
from declutr.trainer.metrics.config import WandbConfig

TENSORBOARD = "tensorboard"
WANDB_ID = "wandb.json"  # the file of a run with the id of its W&B run
_NOT_SHOWN = ("kind", "step", "time", "batch_digest")
_BAR_SECONDS = 0.5
_MOST_WAITING = 10_000  # lines for a program that hangs, about 10 MiB
_UPLOAD_SECONDS, _END_SECONDS, _LAST_SECONDS = 8.0, 10.0, 13.0  # to send the last lines, to end, to wait for the end
_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CREDENTIALS_FILE")
# Nothing but metrics and the settings of the run is collected.
_WANDB_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "finish_timeout": _UPLOAD_SECONDS,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}

Log = Callable[[Mapping[str, Any]], None]  # passes a line of metrics to a program; may fail or hang


class Logger(threading.Thread):
    """Passes lines to a program in a thread of its own, so that a program that fails or hangs is left behind."""

    def __init__(
        self,
        name: str,  # name of the program for messages
        program: Callable[[], AbstractContextManager[Log]],  # starts it, and ends it behind its block
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._program = program
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._added = self._passed = 0
        self._failed = False
        self.start()

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of metrics; never waits, and drops it if the program has failed or hangs."""
        self._added += 1
        if not self._failed:
            try:
                self._lines.put_nowait(line)
            except queue.Full:
                self._fail(f"it takes no lines, {_MOST_WAITING} wait")

    def close(self) -> None:
        """Ends the program, in a limited time; logs the number of lines that it did not get."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:  # it was named then
            return self._name_missing()
        self.join(_LAST_SECONDS)
        if self.is_alive():
            self._fail(f"it did not end within {_LAST_SECONDS:g} s")
        return self._name_missing()

    def run(self) -> None:
        """Starts the program, passes on all lines, and ends it."""
        # Any error of a program is caught here, and nowhere else: its packages are optional and not ours, and the loss
        # of their view, said once in the log, is cheaper than the run. metrics.jsonl has every line.
        try:
            with self._program() as log:
                while (line := self._lines.get()) is not None:
                    if self._failed:
                        return
                    log(line)
                    self._passed += 1
        except Exception as error:  # noqa: BLE001
            reason = (isinstance(error, OSError) and error.strerror) or error
            self._fail(str(reason) if isinstance(error, OSError | ImportError) else f"{type(error).__name__}: {reason}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            for secret in filter(None, map(os.environ.get, _CREDENTIALS)):
                reason = reason.replace(secret, "***")
            get_logger().warning("%s gets no more metrics (%s); metrics.jsonl has all of them", self.name, reason)
        self._failed = True

    def _name_missing(self) -> None:
        if self._failed:
            get_logger().warning(
                "%s lacks the last lines of metrics (%d or more)", self.name, self._added - self._passed
            )


def tags(line: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line of metrics by the tag that programs show, `kind/name`; without those that are None."""
    by_tag = {f"{line['kind']}/{name}": value for name, value in line.items() if name not in _NOT_SHOWN}
    return {tag: value for tag, value in by_tag.items() if value is not None}


@contextmanager
def tensorboard(folder: Path, after_step: int) -> Iterator[Log]:
    """TensorBoard: a new file of events in a run's folder, which hides steps after `after_step` of earlier files."""
    if absent := missing_extra("tensorboard", "a view of the metrics"):
        raise ImportError(absent)
    from torch.utils.tensorboard import SummaryWriter  # needs the package

    folder.stat()  # loading the package takes seconds; the writer would make a folder that was renamed meanwhile anew
    # Flushed here alone: an error of a flush in TensorBoard's own thread would end as a traceback on stderr.
    with SummaryWriter(folder / TENSORBOARD, purge_step=after_step + 1, flush_secs=86_400) as board:

        def log(line: Mapping[str, Any]) -> None:
            for tag, value in tags(line).items():
                if isinstance(value, int | float):
                    board.add_scalar(tag, value, line["step"], line["time"])
            board.flush()  # a kill leaves no hole before the next start

        yield log


def missing_wandb(mode: str) -> str | None:
    """The problem of a run that logs to W&B in this mode without the package; None if there is none."""
    absent = missing_extra("wandb", f"metrics.wandb.mode = {mode}")
    return absent and f"{absent}, or set it to disabled"


def run_id(
    folder: Path,  # folder of the run
    facts: Mapping[str, str],  # what tells this run from any other: its place, host (of a folder), settings and data
) -> str:
    """Id of the W&B run of a run: the stored one, so that a moved run keeps it; else a hash of `facts`, then stored."""
    path = folder / WANDB_ID
    try:
        return read_record(path, dict[str, str])["id"]
    except FileNotFoundError:
        pass
    except (DamagedError, KeyError):
        get_logger().warning("%s is damaged: writing it again", path)
    identity = hash_json(dict(facts))[:16]
    write_json(path, {"id": identity})
    return identity


@contextmanager
def wandb_run(
    config: WandbConfig,  # settings of W&B
    folder: Path,  # folder of the run
    facts: Mapping[str, str],  # as for `run_id`
    settings: dict[str, Any],  # settings of the run, which W&B shows
) -> Iterator[Log]:
    """Weights & Biases: a run in its folder `wandb` in the folder of the run, and at the server in mode online.

    The package has a process of its own, because it hooks `sys.exit` and delays the end of its process.
    """
    if problem := missing_wandb(config.mode):
        raise ImportError(problem)
    server = {} if config.base_url is None else {"base_url": config.base_url}
    arguments = {
        "mode": config.mode,
        "project": config.project,
        "entity": config.entity,
        "id": run_id(folder, facts),
        "name": folder.name,
        "dir": str(folder.absolute()),
        "config": settings,
        "settings": _WANDB_SETTINGS | server,
    }
    # Settings alone decide what is sent, and where; reports of errors would go to W&B from an offline run too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {name: os.environ[name] for name in _CREDENTIALS if os.environ.get(name)}
    with (
        tempfile.TemporaryFile() as errors,  # a pipe would fill, as nobody reads it until the end
        tempfile.TemporaryDirectory() as empty,
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: in the run's folder, `wandb` is a folder of files
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=empty,  # W&B reads settings in its folder, and those of a run may come from somebody else
            env=environment | {"WANDB_ERROR_REPORTING": "false"},
            start_new_session=True,  # Ctrl-C must not end it before the training
        ) as process,
    ):
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(arguments).encode() + b"\n")
            yield partial(_send, process.stdin)
            process.stdin.close()
            if process.wait(_END_SECONDS):
                raise BrokenPipeError
        except subprocess.TimeoutExpired:
            raise OSError(f"its server did not take the last lines in {_END_SECONDS:g} s") from None
        except BrokenPipeError:
            process.wait()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise OSError(lines[-1] if lines else f"its process {process.pid} has ended") from None
        finally:
            process.kill()  # the package waits for its server when a process ends: minutes for one that is gone


def _send(pipe: IO[bytes], line: Mapping[str, Any]) -> None:
    pipe.write(json.dumps(line).encode() + b"\n")
    pipe.flush()


def pass_on() -> None:
    """Passes lines of standard input to W&B until it ends; the first line has the arguments of `wandb.init`."""
    arguments = json.loads(sys.stdin.readline())
    import wandb

    run = wandb.init(**arguments | {"settings": wandb.Settings(**arguments["settings"])}, resume="allow")
    for line in map(json.loads, sys.stdin):
        run.log(tags(line), step=line["step"])
    run.finish()


class ProgressBar(Watcher):
    """Shows step, losses (`terms`), speed, padding, data-wait and ETA while its block runs."""

    def __init__(
        self,
        newest: Callable[[], dict[str, Any] | None],  # returns the newest step's line of metrics; None before the first
        steps: int,  # optimizer steps of the whole run
        terms: Sequence[str],  # names of the loss terms
        rows: str,  # short noun for rows of the shards
        done: int,  # steps of earlier starts
    ) -> None:
        super().__init__(_BAR_SECONDS, "declutr-progress")
        self.newest = newest
        self.terms = terms
        self.rows = rows
        self.bar = bar(total=steps, unit="step", desc="train")
        self.bar.n = self.bar.initial = done
        self._waiting = True

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.look()
        self.bar.close()

    def look(self) -> None:
        """Shows the newest step."""
        line = self.newest()
        if line is None or line["step"] == self.bar.n:
            return
        if self._waiting or line["step"] < self.bar.n:  # count the rate from here
            self._waiting = False
            self.bar.initial = line["step"]
            self.bar.unpause()
        self.bar.n = line["step"]
        if line.get("skipped") or line["loss"] is None:  # of the step, or of an auxiliary task's own update
            self.bar.set_postfix_str("loss not finite, skipped")
            return
        self.bar.set_postfix_str(
            f"loss {line['loss']:.3f} ({' '.join(f'{name} {line[name]:.3f}' for name in self.terms)}) "
            f"{line['documents_per_second']:.0f} {self.rows}/s {line['tokens_per_second'] / 1000:.1f}k tok/s "
            f"padding {line['padding_share']:.1%} data-wait {line['data_wait_share']:.1%}"
            + ("" if line["mfu"] is None else f" MFU {line['mfu']:.1%}")
        )


if __name__ == "__main__":
    pass_on()
