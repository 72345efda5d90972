"""Ray Train's torch backend with workers that hear SIGTERM. Little is imported here: the controller loads this file."""

import signal
from typing import Any

from ray.train.torch import TorchConfig

_signalled: list[str] = []  # of this process: a worker runs one training at a time


def signalled() -> str | None:
    """Name of the signal that this worker was given; None: there was none."""
    return _signalled[0] if _signalled else None


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
        _signalled.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, take_notice)
