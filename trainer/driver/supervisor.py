"""Keeps a run going: starts the group, watches it, starts it again after what can be survived, and says why it ends.

Ray Train is asked for one start of the group at a time (it restarts by itself only to grow or after a drained node), so
that there is one policy for everything that fails: a worker, its node, a hang, the coordinator, the local Ray session.
"""

import secrets
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from common.config import ConfigError
from common.console.logs import get_logger
from common.session import start_ray
from common.stores.address import child
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.driver.failure import FAILURES, GroupFailure, blame_memory, blame_nodes, describe, oom_kills
from trainer.driver.group import Fit, build_group, kill_worker
from trainer.driver.signals import Signals
from trainer.driver.waiting import Waiting
from trainer.driver.watchdog import Watchdog
from trainer.metrics.metrics import METRICS, read_last_step
from trainer.setup.config import TrainConfig
from trainer.worker.channel import EVERY_SECONDS, ChannelReader, ControlChannel
from trainer.worker.heartbeat import Stopwatch, describe_start

_MOST_PAUSE_SECONDS = 60.0
_HEAD_SECONDS = 60.0  # a head that is started again takes its time
_LOST_SECONDS = 20.0  # Ray ends a process that has not reached its head for 60 s


class TrainingFailedError(RuntimeError):
    """The run stopped before its last step; what was saved is kept, the same command continues."""


class RunStoppedError(RuntimeError):
    """The run was told to stop, and did, in good order.

    Attributes:
        status: exit status of the command.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Supervisor:
    """A run from its latest checkpoint to its last step.

    Args:
        config: its paths absolute.
        run: its folder.
        steps: its last step.
        signals: to this process.
        marks: what the start of this command has done so far, for the Stopwatch.

    Attributes:
        line: the newest step's line of metrics; None before the first.
    """

    def __init__(self, config: TrainConfig, run: Path, steps: int, signals: Signals, marks: dict[str, float]) -> None:
        self.config, self.run, self.steps, self.signals = config, run, steps, signals
        self.restarts = 0
        self.line: dict[str, Any] | None = None
        self._started: set[str] = set()
        self._heard: dict[tuple[str, int], int] = {}
        self._said: set[tuple[str, str]] = set()
        self._streak: tuple[tuple[str, int], int] = (("", -1), 0)
        self._watchdog = Watchdog(config.scaling.hang_seconds, config.scaling.slow_factor)
        self._hang = self._noticed = ""
        self._stopwatch = Stopwatch(marks)
        self._waiting: Waiting | None = None

    def run_to_end(self) -> int:
        """Starts the group until the run is at its last step, or its scores get no better; returns the last step taken.

        Raises:
            TrainingFailedError: it will not get there; with the workers' own reason.
            RunStoppedError: after SIGTERM or SIGINT to this process.
        """
        while True:
            self._watchdog = Watchdog(self.config.scaling.hang_seconds, self.config.scaling.slow_factor)
            self._hang = ""
            kills_before = oom_kills()
            outcome = self._start_once()
            if outcome is None:
                return self.steps
            self._stopwatch = Stopwatch({"failure": time.time()})
            if isinstance(outcome, GroupFailure):
                self._go_on_after(blame_memory(outcome, kills_before))
            elif outcome.get("given_up"):
                raise TrainingFailedError(f"{outcome['given_up']}. What was saved before is in {self._checkpoints}")
            elif outcome.get("early"):
                return int(outcome["step"])
            elif self.signals.received is not None:
                raise self._stopped(outcome["step"])
            else:
                reason = self._noticed or outcome["stopped"]
                get_logger().warning("saved at step %d after %s; starting again", outcome["step"], reason)

    @property
    def _checkpoints(self) -> str:
        return child(self.config.run, CHECKPOINTS)

    def _start_once(self) -> dict[str, Any] | GroupFailure | None:
        """One start: None at the end of the run, why its workers ended, or what went wrong."""
        try:
            wait = _HEAD_SECONDS if self.restarts else 0.0
            start_ray(self.config.scaling.num_cpus, self.config.scaling.address, wait)
        except ConfigError as error:  # no cluster answers; one that did before has time to come back
            ray.shutdown()
            if self.restarts == 0:
                raise
            return GroupFailure(f"Ray did not start: {error.problems[0]}", "ray", str(error), lost=True)
        except Exception as error:  # noqa: BLE001 - Ray raises it bare, for example when a busy machine is slow
            ray.shutdown()
            return GroupFailure(
                f"Ray did not start: {error}", "ray", "".join(traceback.format_exception(error)), lost=True
            )
        self.signals.listen()  # ray.init has taken SIGTERM
        self._stopwatch.mark("ray")
        self._waiting = Waiting(self.config.scaling, ray.cluster_resources(), time.monotonic())
        channel = ControlChannel(secrets.token_hex(8))
        fit = Fit(build_group(self.config, self.run, channel.name, self._stopwatch.marks))
        reader = ChannelReader(channel)
        fit.start()
        reader.start()
        try:
            lost = self._watch(fit, reader)
        finally:
            reader.end()
            self._say(reader.heartbeats)
            self._noticed = " and ".join(heartbeat["notice"] for heartbeat in reader.heartbeats if heartbeat["notice"])
        if lost is not None:
            ray.shutdown()
            return lost
        if fit.error is None:
            outcome: dict[str, Any] | None = fit.value
            return outcome
        if self.signals.received is not None:
            raise self._stopped(None)
        failure = blame_nodes(describe(fit.error), reader.heartbeats)
        if self._hang:
            failure = GroupFailure(self._hang, "hang", failure.account)
        elif self._noticed:
            failure = replace(failure, summary=f"{failure.summary}, after {self._noticed}")
        if failure.lost:
            ray.shutdown()
        return failure

    def _watch(self, fit: Fit, reader: ChannelReader) -> GroupFailure | None:
        """Looks at the workers until they end; what was lost, if Ray itself does not answer any more."""
        asked_at: float | None = None
        while not fit.wait(EVERY_SECONDS):
            now = time.monotonic()
            if self.signals.received is not None and asked_at is None:
                asked_at = now
                reader.stop_reason = self.signals.received
            if asked_at is not None and (not reader.heartbeats or now - asked_at > self.config.scaling.stop_seconds):
                if reader.heartbeats:
                    get_logger().warning("the workers did not end within %.0f s", now - asked_at)
                ray.shutdown()  # else nobody is there yet who could save anything
                raise self._stopped(None)
            if reader.draining and reader.stop_reason is None:
                get_logger().warning("%s: saving", reader.draining)
                reader.stop_reason = reader.draining
            silent = now - reader.answered
            if silent > _LOST_SECONDS:
                return GroupFailure(f"Ray's head has not answered for {silent:.0f} s", "head", "", lost=True)
            self._judge(reader.heartbeats, now)
        return None

    def _judge(self, heartbeats: list[dict[str, Any]], now: float) -> None:
        hang = self._watchdog.look(heartbeats, now)
        self._say(heartbeats)
        if self._waiting is not None and (sentence := self._waiting.look(heartbeats, now)):
            get_logger().info("%s", sentence)
        for heartbeat in heartbeats:
            if heartbeat["rank"] == 0 and heartbeat["start"] and heartbeat["group"] not in self._started:
                self._started.add(heartbeat["group"])
                get_logger().info("%s", describe_start(heartbeat["step"] - heartbeat["steps"] + 1, heartbeat["start"]))
        for sentence in self._watchdog.slow():
            get_logger().warning("%s", sentence)
        if hang is None or self._hang:
            return
        self._hang = str(hang)
        get_logger().error("%s; starting the group again", hang)
        kill_worker(hang.heartbeat)

    def _say(self, heartbeats: list[dict[str, Any]]) -> None:
        """Passes on what workers have logged since, what several of them say once, and the first one's numbers."""
        for heartbeat in heartbeats:
            self.line = heartbeat["line"] or self.line
            key = (heartbeat["group"], heartbeat["rank"])
            new = heartbeat["num_logged"] - self._heard.get(key, 0)
            self._heard[key] = heartbeat["num_logged"]
            for words in heartbeat["logged"][-new:] if new > 0 else ():
                if (heartbeat["group"], words) not in self._said:
                    self._said.add((heartbeat["group"], words))
                    get_logger().info("worker %d: %s", heartbeat["rank"], words)

    def _go_on_after(self, failure: GroupFailure) -> None:
        """Counts a failure, pauses if it is not the first without progress.

        Raises:
            TrainingFailedError: there were too many, or it is the same again and again.
        """
        scaling = self.config.scaling
        line = read_last_step(self.run / METRICS)
        step = max(0, self._watchdog.reached, line["step"] if line else 0)
        failure.log(self.run, step)
        here = (failure.kind, step)
        before, times = self._streak
        times = times + 1 if before == here else 1
        self._streak = (here, times)
        where = f"after step {step}: {failure.summary}"
        rest = f"What was saved is in {self._checkpoints}, everything Ray said in {self.run / FAILURES}"
        if times >= scaling.same_failures:
            raise TrainingFailedError(
                f"{where}\nThe same happened {times} times in a row, so it would happen again. {rest}"
            )
        if self.restarts >= scaling.max_failures:
            raise TrainingFailedError(
                f"{where}\nThat was failure {self.restarts + 1}, scaling.max_failures = {scaling.max_failures}: the "
                f"same command continues. {rest}"
            )
        self.restarts += 1
        pause = 0.0 if times == 1 else min(_MOST_PAUSE_SECONDS, scaling.back_off_seconds * 2 ** (times - 2))
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
        """The end after a signal; `step`: what the workers saved on being asked."""
        if not (self.run / "config.yaml").is_file():
            return RunStoppedError(
                f"{self.config.run}: stopped, because its folder was renamed, moved or deleted; what was saved "
                "before is in it: the same command with run=ITS_NEW_PLACE continues",
                self.signals.status,
            )
        where = "stopped without a save of its own" if step is None else f"stopped at step {step} of {self.steps}"
        return RunStoppedError(
            f"{self.config.run}: {where} after {self.signals.received}; the same command continues", self.signals.status
        )
