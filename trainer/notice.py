"""A worker's ear: notices to save and end, from a signal to its own process or from the driver's board.

The driver's notice stands for a signal to the driver and for a node that is about to be taken away.
"""

import threading

from ray.exceptions import RaySystemError, RpcError

from common.logs import get_logger
from trainer.backend import signalled
from trainer.board import Board
from trainer.pulse import Pulse

EVERY_SECONDS = 0.5


class Ear:
    """Posts this worker's pulse and listens for notices, in a thread, while its block runs.

    Args:
        board: of the run.
        pulse: of this worker.
    """

    def __init__(self, board: Board, pulse: Pulse) -> None:
        self._board, self._pulse = board, pulse
        self._heard: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="declutr-ear")

    def notice(self) -> str | None:
        """Why this worker shall save and end; None: it shall not."""
        return signalled() or self._heard

    def __enter__(self) -> "Ear":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                self._board.post(self._pulse.snapshot())
                self._heard = self._board.asked_to_stop()
            except (RpcError, RaySystemError) as error:  # the head is away: Ray itself ends us if it stays away
                get_logger().debug("the board does not answer: %s", error)
            if self._stop.wait(EVERY_SECONDS):
                return
