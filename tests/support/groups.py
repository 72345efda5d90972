"""Real process groups for tests: a function of a test file, run by every rank of a gloo group."""

import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from declutr.trainer.parallel.communicator import Communicator

# Ranks are forked from a server that has imported the slow packages once and has run nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "declutr.trainer.step.step",
        "transformers.models.roberta.modeling_roberta",
        "pandas",
        "pytest",
        "scipy.stats",
    ]
)
_TIMEOUT_SECONDS = 120


def run_group(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `function(comm, *arguments)` of `size` processes, in rank order.

    Args:
        size: number of processes.
        function: a module-level function of a test file.
        arguments: what torch.save can write.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        target = (inspect.getfile(function), function.__name__)
        ranks = [_CONTEXT.Process(target=_rank, args=(rank, size, target, name, sys.path)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_TIMEOUT_SECONDS)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in late:
            ranks[rank].kill()
        errors = "\n".join(path.read_text() for path in sorted(folder.glob("error*")))
        assert not late, f"ranks {late} did not finish in {_TIMEOUT_SECONDS} s\n{errors}"
        assert not errors, errors
        return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, target: tuple[str, str], name: str, path: list[str]) -> None:
    folder = Path(name)
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        spec = importlib.util.spec_from_file_location(f"rank_{Path(target[0]).stem}", target[0])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT_SECONDS // 2),
        )
        arguments = torch.load(folder / "arguments.pt", weights_only=False)
        result = getattr(module, target[1])(Communicator(rank, size), *arguments)
        torch.save(result, folder / f"result{rank}.pt")
        dist.destroy_process_group()
    except BaseException:  # the parent shows it
        (folder / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
