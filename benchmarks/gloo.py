"""Processes of this machine that exchange tensors over gloo."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from declutr.common.storage import write_text
from declutr.trainer.parallel.communicator import Communicator


def run(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `work(comm, *arguments)` in `size` processes with one thread each; return the answers, as JSON, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # "forkserver" for the same reason as in trainer/verify.py
        start_processes(_rank, (folder, size, work, arguments), nprocs=size, start_method="forkserver")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _rank(rank: int, folder: str, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    try:
        write_text(Path(folder) / f"{rank}.json", json.dumps(work(Communicator(rank, size), *arguments)))
    finally:
        dist.destroy_process_group()
