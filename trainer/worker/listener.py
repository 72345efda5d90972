"""A worker's listener: notices to save and end, from a signal to its own process or from the driver's channel.

The driver's notice stands for a signal to the driver and for a node that is about to be taken away.
"""

import threading

from common.console.logs import get_logger
from trainer.worker.backend import signalled
from trainer.worker.channel import EVERY_SECONDS, UNREACHABLE, ControlChannel
from trainer.worker.heartbeat import Heartbeat


class Listener:
    """Posts this worker's heartbeat and listens for notices, in a thread, while its block runs.

    Args:
        channel: of the run.
        heartbeat: of this worker.
    """

    def __init__(self, channel: ControlChannel, heartbeat: Heartbeat) -> None:
        self._channel, self._heartbeat = channel, heartbeat
        self._heard: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="declutr-listener")

    def notice(self) -> str | None:
        """Why this worker shall save and end; None: it shall not."""
        signal = signalled()
        return self._heartbeat.record_signal(signal) if signal else self._heard

    def __enter__(self) -> "Listener":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        ended = False
        while True:
            self.notice()  # onto the heartbeat, also where the training thread is stuck
            try:
                self._channel.post(self._heartbeat.snapshot())
                self._heard = self._channel.stop_reason()
            except UNREACHABLE as error:  # the head is away: Ray itself ends us if it stays away
                get_logger().debug("the channel does not answer: %s", error)
            if ended:
                return
            ended = self._stop.wait(EVERY_SECONDS)  # then once more: its last words
