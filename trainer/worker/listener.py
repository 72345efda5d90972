"""A worker's listener for stop notices: signals to its process, and the driver's notice in the control channel.

The driver sends one after a signal to itself, or when a node is about to be removed.
"""

import contextlib
import math
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.watcher import Watcher
from declutr.trainer.worker.backend import newest_exchanges, signalled
from declutr.trainer.worker.channel import UNREACHABLE, ControlChannel, period
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.mailbox import Mailbox


class Listener(Watcher):
    """Posts heartbeats and reads stop notices, in a thread, while its block runs.

    One worker of each host does so for all of them; the others share files with it (trainer/worker/mailbox.py).

    Args:
        channel: the control channel.
        heartbeat: the worker's heartbeat.
        still_seconds: a worker that stays in one phase for this long adds its newest exchanges.
        folder: folder of the host's files; None: that of temporary files.
    """

    def __init__(
        self,
        channel: ControlChannel,
        heartbeat: Heartbeat,
        still_seconds: float = math.inf,
        folder: Path | None = None,
    ) -> None:
        seconds = period(heartbeat.size)
        super().__init__(seconds, "declutr-listener", at_once=True)
        self._channel, self._heartbeat = channel, heartbeat
        self._still_seconds = still_seconds
        self._received: str | None = None
        name = f"{channel.name}-{heartbeat.node}-{heartbeat.group}"
        self._mailbox = Mailbox(name, heartbeat.rank, seconds, folder)

    def notice(self) -> str | None:
        """Reason to save and stop, or None."""
        signal = signalled()
        return self._heartbeat.record_signal(signal) if signal else self._received

    def look(self) -> None:
        """Writes the heartbeat and reads the driver's notice."""
        self._look(last=False)

    def _look(self, last: bool) -> None:
        """The same; if it is the `last` time, the worker posts its heartbeat itself."""
        self.notice()  # records a signal in the heartbeat even if the training thread hangs
        snapshot = self._heartbeat.snapshot()
        if snapshot["phase_seconds"] >= self._still_seconds:
            snapshot["flight"] = newest_exchanges()
        try:
            self._mailbox.write(snapshot)
            self._received = self._mailbox.stop_reason()
            heartbeats = self._mailbox.heartbeats() if last or self._mailbox.leads() else []
        except (OSError, ValueError) as error:  # for example a full disk: this worker posts for itself
            get_logger().debug("the workers of this host share no files: %s", error)
            heartbeats = [snapshot]
        try:
            if heartbeats:
                self._channel.post(self._heartbeat.rank, heartbeats)
                self._received = self._channel.stop_reason()
        except UNREACHABLE as error:  # Ray's head does not answer; if that lasts, Ray kills this process
            get_logger().debug("the control channel does not answer: %s", error)
        if self._received:
            with contextlib.suppress(OSError):
                self._mailbox.pass_on(self._received)

    def _run(self) -> None:
        super()._run()
        self._look(last=True)  # posts the last log lines
        with contextlib.suppress(OSError):
            self._mailbox.leave()
