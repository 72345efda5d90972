"""Real all-reduce over one process per node, or over two processes of this machine."""

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from declutr.common.cluster import use_network_of
from declutr.doctor.finding import EVERYWHERE, Finding, make_finding

LIMIT_SECONDS = 60
_ELEMENTS = 1 << 20
_ROUNDS = 5


@dataclass(frozen=True)
class Summed:
    """Result of one process: the sum it got, seconds of a sum of 4 MiB, or the error."""

    value: float = 0.0
    seconds: float = 0.0
    error: str = ""


def free_port() -> int:
    """Find a free port of this node."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def join(address: str, rank: int, size: int, backend: str, own: str | None = None) -> Summed:
    """Take part in a sum of `rank + 1` over all processes.

    Args:
        address: `tcp://HOST:PORT` on the first process's node, or `file://PATH` on one machine.
        rank: number of this process.
        size: processes that take part.
        backend: `gloo` or `nccl`; `nccl` uses the process's first GPU.
        own: address of the process's node in the cluster.
    """
    if own:
        use_network_of(own)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        limit = timedelta(seconds=LIMIT_SECONDS)
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=limit)
        values = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(values)
        value = float(values[-1])
        begun = time.perf_counter()
        for _ in range(_ROUNDS):
            dist.all_reduce(values)
        float(values[-1])  # waits for a GPU
        return Summed(value, (time.perf_counter() - begun) / _ROUNDS)
    except (RuntimeError, ValueError, OSError) as error:  # torch raises RuntimeError for communication errors
        return Summed(error=str(error).strip().splitlines()[0][:300])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def alone() -> dict[str, Summed]:
    """Sum over two processes of this machine, or one if it has one GPU: by NCCL if each has a GPU, else by gloo."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = "nccl" if gpus else "gloo"
    size = min(2, gpus or 2)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, context) as pool:
        address = f"file://{folder}/group"
        others = [pool.submit(join, address, rank, size, backend) for rank in range(1, size)]
        found = {"process 0": join(address, 0, size, backend)}
        for rank, other in enumerate(others, 1):
            try:
                found[f"process {rank}"] = other.result()
            except BrokenProcessPool as error:
                found[f"process {rank}"] = Summed(error=str(error))
    return found


def check(backend: str, found: Mapping[str, Summed]) -> Finding:
    """Check that all processes got the sum."""
    name, size = f"all-reduce ({backend})", len(found)
    expected = size * (size + 1) / 2
    wrong = [f"{who}: {one.error or f'sum {one.value}'}" for who, one in found.items() if one.value != expected]
    slowest = max((one.seconds for one in found.values()), default=0.0)
    return make_finding(
        name,
        EVERYWHERE,
        "; ".join(wrong) or f"{size} processes, 4 MiB in {1000 * slowest:.1f} ms",
        limit=f"sum {expected:g}",
        fail=bool(wrong),
        remedy="nodes must reach each other on all ports; if they have several networks, "
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface between the nodes before `ray start`",
    )
