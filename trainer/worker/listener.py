"""A worker's listener for stop notices: signals to its process, and the driver's notice in the control channel.

The driver sends one after a signal to itself, or when a node is about to be removed.
"""

import math

from declutr.common.console.logs import get_logger
from declutr.common.watcher import Watcher
from declutr.trainer.worker.backend import newest_exchanges, signalled
from declutr.trainer.worker.channel import EVERY_SECONDS, UNREACHABLE, ControlChannel
from declutr.trainer.worker.heartbeat import Heartbeat


class Listener(Watcher):
    """Posts this worker's heartbeat and reads stop notices, in a thread, while its block runs.

    A worker that stays in one phase for `still_seconds` adds its newest exchanges.
    """

    def __init__(self, channel: ControlChannel, heartbeat: Heartbeat, still_seconds: float = math.inf) -> None:
        super().__init__(EVERY_SECONDS, "declutr-listener", at_once=True)
        self._channel, self._heartbeat = channel, heartbeat
        self._still_seconds = still_seconds
        self._received: str | None = None

    def notice(self) -> str | None:
        """Reason to save and stop, or None."""
        signal = signalled()
        return self._heartbeat.record_signal(signal) if signal else self._received

    def look(self) -> None:
        """Posts the heartbeat and reads the driver's notice."""
        self.notice()  # records a signal in the heartbeat even if the training thread hangs
        snapshot = self._heartbeat.snapshot()
        if snapshot["phase_seconds"] >= self._still_seconds:
            snapshot["flight"] = newest_exchanges()
        try:
            self._channel.post(snapshot)
            self._received = self._channel.stop_reason()
        except UNREACHABLE as error:  # Ray's head does not answer; if that lasts, Ray kills this process
            get_logger().debug("the control channel does not answer: %s", error)

    def _run(self) -> None:
        super()._run()
        self.look()  # posts the last log lines
