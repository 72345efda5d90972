"""A worker's ear: notices to save and end, from a signal to its own process or from the driver's bulletin.

The driver's notice stands for a signal to the driver and for a node that is about to be taken away.
"""

import threading

from common.console.logs import get_logger
from trainer.worker.backend import signalled
from trainer.worker.channel import EVERY_SECONDS, UNREACHABLE, Bulletin
from trainer.worker.heartbeat import Pulse


class Ear:
    """Posts this worker's pulse and listens for notices, in a thread, while its block runs.

    Args:
        bulletin: of the run.
        pulse: of this worker.
    """

    def __init__(self, bulletin: Bulletin, pulse: Pulse) -> None:
        self._bulletin, self._pulse = bulletin, pulse
        self._heard: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="declutr-ear")

    def notice(self) -> str | None:
        """Why this worker shall save and end; None: it shall not."""
        signal = signalled()
        return self._pulse.take_notice(signal) if signal else self._heard

    def __enter__(self) -> "Ear":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        ended = False
        while True:
            self.notice()  # onto the pulse, also where the training thread is stuck
            try:
                self._bulletin.post(self._pulse.snapshot())
                self._heard = self._bulletin.asked_to_stop()
            except UNREACHABLE as error:  # the head is away: Ray itself ends us if it stays away
                get_logger().debug("the bulletin does not answer: %s", error)
            if ended:
                return
            ended = self._stop.wait(EVERY_SECONDS)  # then once more: its last words
