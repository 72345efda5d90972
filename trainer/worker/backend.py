"""The workers' process group: Ray's TorchConfig, whose workers also take SIGTERM as a stop notice.

Ray has no setting for that. A signal reaches the main thread of a process alone, and a worker trains in another thread;
without a handler SIGTERM would end the worker during a step. So a backend, Ray's extension point, installs it.
"""

import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.train.torch import TorchConfig

from declutr.common.cluster import use_network_of

_signalled: list[str] = []  # signals to this process, which runs one training at a time
_missing: list[str] = []  # why the group has no GPUs


def signalled() -> str | None:
    """Name of the first signal to this worker, or None."""
    return _signalled[0] if _signalled else None


def missing_gpu() -> str | None:
    """The reason why the group was not joined, on every worker of it: one of them cannot use its GPU."""
    return _missing[0] if _missing else None


@dataclass
class GroupConfig(TorchConfig):  # type: ignore[misc]
    """A torch process group over all workers, which treat SIGTERM as a stop notice instead of dying during a step."""

    deterministic: bool = False  # sums over GPUs repeat their bits

    @property
    def backend_cls(self) -> Any:
        """The class that sets up the group."""
        return _Group


_RaysBackend: Any = TorchConfig().backend_cls


class _Group(_RaysBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        worker_group.execute(_prepare, backend_config.deterministic)
        if "nccl" in str(backend_config.backend):
            problems = [problem for problem in worker_group.execute(_gpu_problem) if problem]
            if problems:  # raised here, it would be retried for minutes; the workers end at once
                worker_group.execute(_refuse, problems[0])
                return
        super().on_start(worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: GroupConfig) -> None:
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(listen)


def _prepare(deterministic: bool) -> None:
    """Sets what torch reads when it makes the process group, and when it first uses a GPU, which Ray does next."""
    if deterministic:
        # hosts whose switches add (NVLS) would do so in the order in which the GPUs' values arrive
        os.environ.setdefault("NCCL_ALGO", "Ring")
    # batches have different lengths, whose blocks would not fit into each other
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch's older name of the same
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    use_network_of(ray.util.get_node_ip_address())


def _gpu_problem() -> str | None:
    """A message if torch cannot use the GPU that Ray has reserved here: Ray counts GPUs when a node starts."""
    if torch.cuda.is_available():
        return None
    problem = f"this run trains on GPUs, and torch {torch.__version__} can use none on host {socket.gethostname()}"
    if not torch.backends.cuda.is_built():
        return f"{problem}, because it is built without CUDA; install torch with CUDA on all hosts"
    return f"{problem}; check `nvidia-smi` there, and restart or replace the host"


def _refuse(problem: str) -> None:
    _missing.append(problem)


def listen() -> None:
    """Makes the first SIGTERM a stop notice; the second one ends the process. Call it from the main thread."""
    _signalled.clear()  # of an earlier training in this process
    before = signal.getsignal(signal.SIGTERM)

    def take_notice(number: int, frame: Any) -> None:
        if _signalled and callable(before):
            before(number, frame)
        _signalled.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, take_notice)
