"""The workers' process group. No torch is imported here but by the workers: the controller loads this file.

Ray's own `TorchConfig` lies in a package that imports torch; without it the controller, for which every start of the
group waits, is there two seconds sooner.
"""

import os
import signal
import socket
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

from common.console.logs import get_logger

_LEAVE_SECONDS = 30.0

_signalled: list[str] = []  # of this process: a worker runs one training at a time


def signalled() -> str | None:
    """Name of the signal that this worker was given; None: there was none."""
    return _signalled[0] if _signalled else None


@dataclass
class GroupConfig(BackendConfig):  # type: ignore[misc]
    """A process group of torch over all workers, which take SIGTERM as a notice instead of dying within a step.

    Attributes:
        backend: nccl or gloo.
        timeout_seconds: how long an exchange between workers may take.
    """

    backend: str
    timeout_seconds: float

    @property
    def backend_cls(self) -> Any:
        """What sets the group up."""
        return _Group

    @property
    def train_func_context(self) -> Any:
        """Ray's own around the training: the worker's GPU is the current one."""
        from ray.train.torch.config import TorchConfigContextManager

        return TorchConfigContextManager

    def to_dict(self) -> dict[str, Any]:
        """For Ray's records."""
        return asdict(self)


class _Group(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # NCCL between the GPUs of a host

    def on_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        address, port = worker_group.execute_single(0, _place)
        worker_group.execute(_join, address, port, backend_config.backend, backend_config.timeout_seconds)

    def on_training_start(self, worker_group: Any, backend_config: GroupConfig) -> None:  # noqa: ARG002
        worker_group.execute(listen)

    def on_shutdown(self, worker_group: Any, backend_config: GroupConfig) -> None:  # noqa: ARG002
        try:
            ray.get(worker_group.execute_async(_leave), timeout=_LEAVE_SECONDS)
        except GetTimeoutError:
            get_logger().warning("the workers did not leave their group within %.0f s", _LEAVE_SECONDS)


def _place() -> tuple[str, int]:
    """An address of this host, and a port that is free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _join(address: str, port: int, backend: str, timeout_seconds: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def listen() -> None:
    """Takes SIGTERM as a notice from now on. For the main thread; the second SIGTERM ends the process."""
    _signalled.clear()
    before = signal.getsignal(signal.SIGTERM)

    def take_notice(number: int, frame: Any) -> None:
        if _signalled and callable(before):
            before(number, frame)
        _signalled.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, take_notice)
