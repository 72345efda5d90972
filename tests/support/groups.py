"""Real process groups for tests: a function of a test file, run by every rank of a gloo group."""

import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from declutr.trainer.parallel.communicator import Communicator

# Ranks are forked from a server that has imported the slow packages once and has run nothing.
_CONTEXT = multiprocessing.get_context("forkserver")
_MODELS = "transformers.models.roberta.modeling_roberta"
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "declutr.trainer.step.step", _MODELS, "pandas", "pytest", "scipy.stats"]
)
_TIMEOUT_SECONDS = 120


def run_group(size, function, *arguments):
    """Results of `function(comm, *arguments)`, a function of a test file, of `size` processes, in rank order."""
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


def _rank(rank, size, target, name, path):
    folder = Path(name)
    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        spec = importlib.util.spec_from_file_location(f"rank_{Path(target[0]).stem}", target[0])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        place, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=_TIMEOUT_SECONDS // 2)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timeout)
        arguments = torch.load(folder / "arguments.pt", weights_only=False)
        torch.save(getattr(module, target[1])(Communicator(rank, size), *arguments), folder / f"result{rank}.pt")
        dist.destroy_process_group()
    except BaseException:  # the parent shows it
        (folder / f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
