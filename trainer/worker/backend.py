"""The workers' process group. Only workers import torch here, because Ray's controller loads this file too.

The package of Ray's `TorchConfig` imports torch. Without that import the controller, which delays every start of the
group, is ready two seconds sooner.
"""

import os
import signal
import socket
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

from common.cluster import use_network_of
from common.console.logs import get_logger
from trainer.worker.flight import record_exchanges

_LEAVE_SECONDS = 30.0

_signalled: list[str] = []  # signals to this process, which runs one training at a time
_missing: list[str] = []  # why the group has no GPUs


def signalled() -> str | None:
    """Name of the first signal to this worker, or None."""
    return _signalled[0] if _signalled else None


def missing_gpu() -> str | None:
    """The reason why the group was not joined, on every worker of it: one of them cannot use its GPU."""
    return _missing[0] if _missing else None


@dataclass
class GroupConfig(BackendConfig):  # type: ignore[misc]
    """A torch process group over all workers, which treat SIGTERM as a stop notice instead of dying during a step.

    Attributes:
        backend: of tensors on the workers' devices, nccl or gloo.
        timeout_seconds: time limit of an exchange between workers.
    """

    backend: str
    timeout_seconds: float

    @property
    def backend_cls(self) -> Any:
        """The class that sets up the group."""
        return _Group

    @property
    def train_func_context(self) -> Any:
        """Ray's context manager around the training, which selects the worker's GPU."""
        from ray.train.torch.config import TorchConfigContextManager

        return TorchConfigContextManager

    def to_dict(self) -> dict[str, Any]:
        """The settings, for Ray's records."""
        return asdict(self)


class _Group(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True  # NCCL between the GPUs of a host

    def on_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        if backend_config.backend == "nccl":
            problems = [problem for problem in worker_group.execute(_gpu_problem) if problem]
            if problems:  # raised here, it would be retried for minutes; the workers end at once
                worker_group.execute(_refuse, problems[0])
                return
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
    """Address of this host and a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _join(address: str, port: int, backend: str, timeout_seconds: float) -> None:
    from datetime import timedelta

    import ray.train.torch
    import torch.distributed as dist

    record_exchanges()
    use_network_of(ray.util.get_node_ip_address())
    context = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    # NCCL otherwise guesses the GPU from the rank at the first exchange, and waits there if hosts differ
    device = ray.train.torch.get_device() if backend == "nccl" else None
    # numbers of the host are exchanged over gloo: through NCCL, every exchange would wait for the GPU
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(backends, timeout=timedelta(seconds=timeout_seconds), device_id=device)


def _gpu_problem() -> str | None:
    """A message if torch cannot use the GPU that Ray has reserved here: Ray counts GPUs when a node starts."""
    import torch

    if torch.cuda.is_available():
        return None
    found = f"this run trains on GPUs, and torch {torch.__version__} can use none on host {socket.gethostname()}"
    if not torch.backends.cuda.is_built():
        return f"{found}, because it is built without CUDA; install torch with CUDA on all hosts"
    return f"{found}; check `nvidia-smi` there, and restart or replace the host"


def _refuse(problem: str) -> None:
    _missing.append(problem)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def listen() -> None:
    """Makes the first SIGTERM a stop notice; the second one ends the process. Call it from the main thread."""
    _signalled.clear()
    before = signal.getsignal(signal.SIGTERM)

    def take_notice(number: int, frame: Any) -> None:
        if _signalled and callable(before):
            before(number, frame)
        _signalled.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, take_notice)
