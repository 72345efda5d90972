"""A worker's ear: notices to save and end, from a signal to its own process or from the driver's board.

The driver's notice stands for a signal to the driver and for a node that is about to be taken away.
"""

import signal
import socket
import threading
from typing import Any

from ray.exceptions import RaySystemError, RpcError
from ray.train.torch import TorchConfig

from common.logs import get_logger
from trainer.board import Board
from trainer.pulse import Pulse

EVERY_SECONDS = 0.5
_signalled: list[str] = []  # of this process: a worker runs one training at a time


class SignalledTorchConfig(TorchConfig):  # type: ignore[misc]
    """Ray Train's torch backend, with workers that take SIGTERM as a notice instead of dying within a step."""

    @property
    def backend_cls(self) -> Any:
        """The backend, which each worker's main thread runs before the training starts."""
        return _SignalledBackend


_Backend: Any = TorchConfig().backend_cls


class _SignalledBackend(_Backend):  # type: ignore[misc]
    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(listen)


def listen() -> None:
    """Takes SIGTERM as a notice from now on. For the main thread; the second SIGTERM ends the process."""
    _signalled.clear()
    before = signal.getsignal(signal.SIGTERM)

    def take_notice(number: int, frame: Any) -> None:
        if _signalled and callable(before):
            before(number, frame)
        _signalled.append(f"{signal.Signals(number).name} to a worker on {socket.gethostname()}")

    signal.signal(signal.SIGTERM, take_notice)


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
        return _signalled[0] if _signalled else self._heard

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
