"""Supervises a run: starts the worker group, watches it, restarts it after recoverable failures, and reports its end.

Ray Train performs one start of the group at a time; it restarts a group by itself only to grow it or after a node was
drained. So one policy covers every failure: of a worker, its node, the coordinator, the local Ray session, or a hang.
Without Ray (`scaling.num_workers: 0`) the steps are taken in this process, and an error ends the run.
"""

import secrets
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import ray

from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, RunStoppedError, TrainingFailedError
from declutr.common.session import start_ray
from declutr.common.stores.address import child
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.store import RunStore
from declutr.trainer.driver.continuation import FAILURES, choose_device
from declutr.trainer.driver.failure import GroupFailure, blame_memory, blame_node, describe, oom_kills
from declutr.trainer.driver.group import build_group, kill_worker, start_fit
from declutr.trainer.metrics.metrics import METRICS, read_last_step
from declutr.trainer.run import RunPlan
from declutr.trainer.worker.channel import EVERY_SECONDS, ChannelReader, ControlChannel
from declutr.trainer.worker.heartbeat import Hang, Heartbeat, Watchdog

_MOST_PAUSE_SECONDS = 60.0
_HEAD_SECONDS = 60.0  # a restarted head needs this long
_END_SECONDS = 10.0  # for the group's thread to notice that Ray was shut down
_SLOW_SECONDS = 60.0  # a start takes a few seconds, and on a busy machine half a minute
_LOST_SECONDS = 20.0  # Ray kills a process that has not reached its head for 60 s


# SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C to the driver: the first requests a stop with a save, a later one exits at
# once. A closed terminal or connection sends SIGHUP. One that is ignored, as under `nohup`, stays ignored. Batch
# systems announce the end of a job with SIGUSR1.

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SAME_SECONDS = 1.0
"""Signals within this time are one request: `timeout` sends SIGTERM twice, a closing terminal and its shell SIGHUP."""


class Signals:
    """Records signals while its block runs, in the main thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: str | None = None  # name of the first signal, or another reason to stop
        self.status = 1  # exit status for this reason
        self._clock = clock
        self._first_at: float | None = None
        self._last: str | None = None
        self._requested = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other
            self._before = {number: signal.getsignal(number) for number in _NUMBERS}
            if self._before[signal.SIGHUP] == signal.SIG_IGN:
                del self._before[signal.SIGHUP]
            for number in self._before:
                signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._last:  # not logged by the handler, which may have interrupted a write to the same stream
            message = "%s after %s: stopping at once, without saving; the same command continues after the last save"
            get_logger().warning(message, self._last, self.received)

    def request_stop(self, reason: str) -> None:
        """Requests a stop as a signal does."""
        if self.received is None:
            self.received = reason
            self._requested.set()

    def wait(self, seconds: float) -> bool:
        """Pauses at most this many seconds; True as soon as a stop is requested."""
        return self._requested.wait(seconds)

    def _take(self, number: int, frame: Any) -> None:  # noqa: ARG002 - the signature of a handler
        now, name = self._clock(), signal.Signals(number).name
        if self._first_at is not None and now - self._first_at < _SAME_SECONDS:
            return
        self.status = 128 + number
        if self.received is not None:
            self._last = name
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.status)
        self._first_at = now
        self.request_stop(name)


class Supervisor:
    """Runs the worker group from the run's latest checkpoint to its last step.

    `began` is the begin of the command (Unix time). `store` gets the run's device; None: a run in a folder.
    """

    def __init__(self, plan: RunPlan, signals: Signals, began: float, store: RunStore | None) -> None:
        self.scaling, self.run, self.steps, self.signals = plan.config.scaling, plan.folder, plan.total_steps, signals
        self._plan, self._settings = plan, plan.for_workers()
        self._name = str(self._settings["config"]["run"])
        self._checkpoints = child(self._name, CHECKPOINTS)
        self.restarts = 0
        self._here = Heartbeat(0, 1)  # of a run in this process
        self._line: dict[str, Any] | None = None
        self._num_read: dict[tuple[str, int], int] = {}
        self._logged: set[tuple[str, str]] = set()
        self._streak: tuple[tuple[str, int], int] = (("", -1), 0)
        self._watchdog = Watchdog(self.scaling.watchdog_timeout_seconds)
        self._hang: Hang | None = None
        self._notices = ""
        self._began = began
        self._store = store

    @property
    def line(self) -> dict[str, Any] | None:
        """The newest step's line of metrics; None before the first."""
        return self._here.line or self._line

    def run_to_end(self) -> int:
        """Starts the group until the run reaches its last step or stops early; returns the last step taken."""
        while True:
            self._watchdog = Watchdog(self.scaling.watchdog_timeout_seconds)
            self._hang = None
            kills_before = oom_kills()
            outcome = self._train_here() if self.scaling.local else self._start_once()
            if outcome is None:
                return self.steps
            self._began = time.time()  # of the next start, whose seconds are logged
            if isinstance(outcome, GroupFailure):
                self._continue_after(blame_memory(outcome, kills_before))
            elif outcome.get("given_up"):
                raise TrainingFailedError(f"{outcome['given_up']}. Checkpoints so far, if any: {self._checkpoints}")
            elif outcome.get("early"):
                return int(outcome["step"])
            elif self.signals.received is not None:
                raise self._stopped(outcome["step"])
            else:
                reason = self._notices or outcome["stopped"]
                get_logger().warning("saved at step %d after %s; starting again", outcome["step"], reason)

    def _train_here(self) -> dict[str, Any] | None:
        """Takes the steps in this process; the result is that of `work`."""
        import torch  # which a driver of a group does not need

        from declutr.trainer.worker.device import torch_as_before
        from declutr.trainer.worker.entry import work

        device = torch.device(choose_device(self.scaling, self.run, self._store, {"GPU": torch.cuda.device_count()}))
        config, identity = self._plan.config, self._plan.identity
        with torch_as_before():
            return work(config, identity, device, self._here, self._began, lambda: self.signals.received)

    def _start_once(self) -> dict[str, Any] | GroupFailure | None:
        """Starts the group once; None at the last step, else the result of its workers or the failure."""
        try:
            start_ray(self.scaling.num_cpus, self.scaling.address, _HEAD_SECONDS if self.restarts else 0.0)
        except Exception as error:  # Ray raises a bare Exception, for example on a busy machine
            ray.shutdown()
            why, account = str(error), "".join(traceback.format_exception(error))
            if isinstance(error, ConfigError):  # no cluster answers; one that answered before gets time to return
                if self.restarts == 0:
                    raise
                why, account = error.problems[0], str(error)
            return GroupFailure(f"Ray did not start: {why}", "ray", account, lost=True)
        device = choose_device(self.scaling, self.run, self._store, ray.cluster_resources())
        channel = ControlChannel(secrets.token_hex(8))
        settings = {**self._settings, "device": device, "channel": channel.name, "began": self._began}
        trainer, reader = build_group(self.scaling, self.run, settings), ChannelReader(channel)
        fit = start_fit(trainer)
        try:
            with reader:
                lost = self._watch(fit, reader)  # the reader's end reads the last lines
        finally:
            self._log_new_lines(reader.heartbeats)
            self._notices = " and ".join(heartbeat["notice"] for heartbeat in reader.heartbeats if heartbeat["notice"])
        if lost is not None:
            ray.shutdown()
            return lost
        cause = fit.exception()
        if cause is None:
            return fit.result()
        if self.signals.received is not None:
            raise self._stopped(None)
        failure = blame_node(describe(cause), {heartbeat["node"] for heartbeat in reader.heartbeats}, self.signals.wait)
        if self._hang:
            failure = GroupFailure(str(self._hang), "hang", failure.account)
        elif self._notices:
            failure = replace(failure, summary=f"{failure.summary}, after {self._notices}")
        if failure.lost:  # the next start needs a new session
            ray.shutdown()
        return failure

    def _watch(self, fit: Future[Any], reader: ChannelReader) -> GroupFailure | None:
        """Watches the workers until they end, and kills one that hangs; returns a failure if Ray no longer answers."""
        asked_at: float | None = None
        began = time.monotonic()
        report_at = began + _SLOW_SECONDS  # of a start without a step, once a minute
        while not wait([fit], EVERY_SECONDS).done:
            now = time.monotonic()
            if self.signals.received is not None and asked_at is None:
                asked_at = now
                message = "%s: saving and stopping, within %g s; a second signal stops at once, without saving"
                get_logger().warning(message, self.signals.received, self.scaling.shutdown_grace_seconds)
                reader.stop_reason = self.signals.received
            if asked_at is not None and (not reader.heartbeats or now - asked_at > self.scaling.shutdown_grace_seconds):
                if reader.heartbeats:
                    get_logger().warning("the workers did not stop within %.0f s", now - asked_at)
                ray.shutdown()  # without heartbeats no worker could save yet
                wait([fit], _END_SECONDS)  # a thread that is still inside Ray can crash the process at its end
                raise self._stopped(None)
            if reader.draining and reader.stop_reason is None:
                get_logger().warning("%s: saving", reader.draining)
                reader.stop_reason = reader.draining
            silent = now - reader.answered
            if silent > _LOST_SECONDS:
                return GroupFailure(f"Ray's head has not answered for {silent:.0f} s", "head", "", lost=True)
            hang = self._watchdog.look(reader.heartbeats, now)
            self._log_new_lines(reader.heartbeats)
            if any(heartbeat["steps"] for heartbeat in reader.heartbeats):
                report_at = float("inf")
            elif now >= report_at:
                report_at += _SLOW_SECONDS
                counts = Counter(heartbeat["phase"] for heartbeat in reader.heartbeats)
                phases = ", ".join(f"{number} {phase}" for phase, number in sorted(counts.items())) or "none"
                message = "no step yet after %.0f s; workers that have started: %s"
                get_logger().info(message, now - began, phases)
            if hang is not None and self._hang is None:
                self._hang = hang
                get_logger().error("%s; starting the group again", hang)
                kill_worker(hang.heartbeat)
        return None

    def _log_new_lines(self, heartbeats: list[dict[str, Any]]) -> None:
        """Logs new lines of the workers, equal ones once, and keeps the first worker's newest metrics."""
        for heartbeat in heartbeats:
            self._line = heartbeat["line"] or self._line
            key = (heartbeat["group"], heartbeat["rank"])
            new = heartbeat["num_logged"] - self._num_read.get(key, 0)
            self._num_read[key] = heartbeat["num_logged"]
            for line in heartbeat["logged"][-new:] if new > 0 else ():
                if (heartbeat["group"], line) not in self._logged:
                    self._logged.add((heartbeat["group"], line))
                    get_logger().info("worker %d: %s", heartbeat["rank"], line)

    def _continue_after(self, failure: GroupFailure) -> None:
        """Counts a failure, and pauses unless it is the first without progress."""
        scaling = self.scaling
        line = read_last_step(self.run / METRICS)
        step = max(0, self._watchdog.reached, line["step"] if line else 0)
        failure.log(self.run, step)
        here = (failure.kind, step)
        before, times = self._streak
        times = times + 1 if before == here else 1
        self._streak = (here, times)
        where = f"after step {step}: {failure.summary}"
        rest = f"Checkpoints are in {self._checkpoints}, Ray's full error messages in {self.run / FAILURES}"
        why = ""
        if times >= scaling.max_repeated_failures:
            limit = f"scaling.max_repeated_failures = {scaling.max_repeated_failures}"
            why = f"The same failure happened {times} times in a row ({limit}), so it would happen again"
        elif self.restarts >= scaling.max_failures:
            limit = f"scaling.max_failures = {scaling.max_failures}"
            why = f"That was failure {self.restarts + 1} ({limit}). The same command continues"
        if why:
            raise TrainingFailedError(f"{where}\n{why}. {rest}")
        self.restarts += 1
        # none at first: hosts of a spot market go all day
        pause = 0.0 if times == 1 else min(_MOST_PAUSE_SECONDS, scaling.restart_backoff_seconds * 2 ** (times - 2))
        get_logger().warning(
            "%s; starting again%s (restart %d of at most %d)",
            where,
            f" in {pause:g} s" if pause else "",
            self.restarts,
            scaling.max_failures,
        )
        if self.signals.wait(pause):
            raise self._stopped(None)

    def _stopped(self, step: int | None) -> RunStoppedError:
        """The error after a request to stop; `step`: the step that the workers saved, None if they saved none."""
        where = "without a new checkpoint" if step is None else f"at step {step} of {self.steps}"
        how = f" {where} after {self.signals.received}; the same command continues"
        if not (self.run / "config.yaml").is_file():
            how = ", because its folder was renamed, moved or deleted; checkpoints saved before are in it. The same "
            how += "command with run=NEW_FOLDER continues"
        return RunStoppedError(f"{self._name}: stopped{how}", self.signals.status)
