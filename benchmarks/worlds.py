"""Bits and cost of `scaling.elastic_determinism`: the same training with several numbers of workers.

    python -m benchmarks.worlds --json OUT [--model demo] [--worlds 1 2 3 7] [--steps 6] [--processes 2]

Each number of workers trains from the same weights; one training changes its workers from 2 to 3 to 1 through
checkpoints. The processes run on this machine's CPUs over gloo, one thread each. Ratios are those of deterministic
steps to ordinary ones of `--processes` workers: times of steps that take turns, and the bytes that a worker gives to
exchanges in a step.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks import record, workload
from declutr.common.storage import write_text
from declutr.trainer.checkpoints import checkpoint, weights
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.data.batches import RankBatch, collated
from declutr.trainer.data.plan import Plan
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import FixedPointReducer
from declutr.trainer.step.step import TrainStep

_CHANGES = [2, 3, 1]


def in_processes(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `work(comm, *arguments)` in `size` processes with one thread each; return the answers, as JSON, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        # "forkserver" for the same reason as in trainer/verify.py
        start_processes(_rank, (folder, size, work, arguments), nprocs=size, start_method="forkserver")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _rank(rank: int, folder: str, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # threads would decide the order of sums
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    try:
        write_text(Path(folder) / f"{rank}.json", json.dumps(work(Communicator(rank, size), *arguments)))
    finally:
        dist.destroy_process_group()


def train_step_of(options: argparse.Namespace, comm: Communicator, deterministic: bool) -> TrainStep:
    """The train step of a worker, with weights drawn from the seed."""
    setting = workload.Workload.of(options, dropout=options.dropout)
    train_step = setting.train_step(
        setting.encoder(), options.microbatch_tokens, replace(comm, deterministic=deterministic)
    )
    if not deterministic:
        return train_step
    parameters = [p for group in train_step.optimizer.param_groups for p in group["params"]]
    reducer = FixedPointReducer(train_step.comm, parameters, -(-options.documents // options.unit) + 1)
    return replace(train_step, tasks=(replace(train_step.tasks[0], reducer=reducer),))


def batch_of(options: argparse.Namespace, comm: Communicator, step: int, deterministic: bool) -> RankBatch:
    """A worker's share of a step's batch."""
    setting = workload.Workload.of(options)
    unit = options.unit if deterministic else None
    plan = Plan(options.seed, options.documents, options.documents, unit)
    start, end = plan.slice(comm.rank, comm.size)
    rows = setting.rows(step * options.documents, options.documents).slice(start, end - start)
    return collated(setting.collator(), rows, np.zeros(len(rows), np.int64), start, unit)


def train(comm: Communicator, options: argparse.Namespace, first: int, last: int, folder: str | None = None) -> str:
    """The checksum after steps first..last, from the checkpoint of the step before and with one after the last."""
    train_step = train_step_of(options, comm, deterministic=True)
    if folder is not None and first > 1:
        weights.load(checkpoint.checkpoint_path(Path(folder), first - 1), [train_step])
    for step in range(first, last + 1):
        train_step.step({"": batch_of(options, comm, step, deterministic=True)}, step)
    if folder is not None:
        contents = weights.collect([train_step], keep=comm.rank == 0)
        if comm.rank == 0:
            done: dict[str, Any] = {"step": last, "documents": last * options.documents, "world_size": comm.size}
            state = RunState(**done, config_hash="", data_hash="", scores={}, files={})
            checkpoint.save(Path(folder), state, contents)
        comm.all_reduce_max(0)  # the next workers read it
    return workload.checksum(train_step)


def turns(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of ordinary and deterministic steps that take turns, and the bytes of their exchanges."""
    sides = {deterministic: train_step_of(options, comm, deterministic) for deterministic in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counted: dict[bool, int] = {}
    for step in range(1, options.steps + 2):  # the first is not measured
        for deterministic, train_step in sides.items():
            batch = batch_of(options, comm, step, deterministic)
            comm.all_reduce_max(0)  # so that all start together
            begun = time.perf_counter()
            counted[deterministic] = _exchanged(partial(train_step.step, {"": batch}, step))
            seconds[deterministic].append(time.perf_counter() - begun)
    return {"seconds": [seconds[False][1:], seconds[True][1:]], "bytes": [counted[False], counted[True]]}


def _exchanged(work: Callable[[], Any]) -> int:
    """Bytes of the tensors that this worker gives to all-reduces during `work`."""
    sizes, reduce = list[int](), dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        sizes.append(tensor.nbytes)
        return reduce(tensor, *arguments, **keywords)

    with patch.object(dist, "all_reduce", counting):
        work()
    return sum(sizes)


def changing(options: argparse.Namespace) -> str:
    """Checksum after a training whose number of workers changes twice."""
    cuts = [options.steps * number // len(_CHANGES) for number in range(len(_CHANGES) + 1)]
    with tempfile.TemporaryDirectory() as folder:
        for size, begin, end in zip(_CHANGES, cuts[:-1], cuts[1:], strict=True):
            ranks = in_processes(size, train, options, begin + 1, end, folder)
    return str(ranks[0])


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("worlds", __doc__)
    workload.add_options(parser, "demo", 16, (32, 128))
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 7], help="numbers of workers")
    parser.add_argument("--processes", type=int, default=2, help="workers of the ratios")
    parser.add_argument("--unit", type=int, default=1, help="documents of a canonical microbatch")
    parser.add_argument("--microbatch-tokens", type=int, help="default: a worker's whole share")
    parser.add_argument("--steps", type=int, default=6, help="steps of each training, at least 3")
    parser.add_argument("--dropout", type=float, default=0.1)
    options = record.parse(parser, arguments)
    if options.steps < len(_CHANGES):
        parser.error(f"--steps {options.steps} is too small; give at least {len(_CHANGES)}")
    trained = {size: in_processes(size, train, options, 1, options.steps) for size in options.worlds}
    worlds: list[dict[str, Any]] = [
        {"world": size, "checksum": checksum}  # one of a training, unless its workers differ
        for size, ranks in trained.items()
        for checksum in sorted(set(ranks))
    ]
    worlds.append({"world": " -> ".join(map(str, _CHANGES)), "checksum": changing(options)})
    # all ranks wait for each other, so one's times are those of all
    measured = in_processes(options.processes, turns, options)[0]
    plain, fixed = measured["seconds"]
    ratios = record.ratios(fixed, plain)
    figures = {
        "benchmark": "worlds",
        **{key: value for key, value in vars(options).items() if key not in ("json", "commit", "facts")},
        "worlds": worlds,
        "equal": len({world["checksum"] for world in worlds}) == 1,
        "time_ratio": ratios["ratio_median"],
        "time_ratio_range": ratios["ratio_range"],
        "bytes_ratio": round(measured["bytes"][1] / max(1, measured["bytes"][0]), 4),
        "seconds": {"ordinary": statistics.median(plain), "bitwise": statistics.median(fixed)},
        "bytes": {"ordinary": measured["bytes"][0], "bitwise": measured["bytes"][1]},
    }
    record.publish(figures, options)


if __name__ == "__main__":
    main()
