"""Bits and cost of `scaling.elastic_determinism`: the same training with several numbers of workers.

    python -m benchmarks.step.worlds --json OUT [--model demo] [--worlds 1 2 3 7] [--steps 6] [--processes 2]

Each number of workers trains from the same weights; one training changes its workers from 2 to 3 to 1 through
checkpoints. The processes run on this machine's CPUs over gloo, one thread each. Ratios are those of deterministic
steps to ordinary ones of `--processes` workers: times of steps that take turns, the growth of a worker's resident
memory in a separate training, and the bytes that a worker gives to exchanges in a step.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import gloo, memory, record
from benchmarks.workload import models, packed
from declutr.trainer.checkpoints import checkpoint, weights
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.canonical import collate_canonical
from declutr.trainer.data.plan import Plan
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.fixedpoint import FixedPointReducer
from declutr.trainer.step.step import TrainStep

_CHANGES = [2, 3, 1]


def train_step_of(options: argparse.Namespace, comm: Communicator, deterministic: bool) -> TrainStep:
    """The train step of a worker, with weights drawn from the seed."""
    workload = packed.Workload.of(options, dropout=options.dropout)
    made = workload.train_step(
        workload.encoder(), options.microbatch_tokens, replace(comm, deterministic=deterministic)
    )
    if not deterministic:
        return made
    parameters = [p for group in made.optimizer.param_groups for p in group["params"]]
    reducer = FixedPointReducer(made.comm, parameters, -(-options.documents // options.unit) + 1)
    return replace(made, tasks=(replace(made.tasks[0], reducer=reducer),))


def batch_of(options: argparse.Namespace, comm: Communicator, step: int, deterministic: bool) -> RankBatch:
    """A worker's share of a step's batch."""
    workload = packed.Workload.of(options)
    unit = options.unit if deterministic else None
    plan = Plan(options.seed, options.documents, options.documents, unit)
    start, end = plan.slice(comm.rank, comm.size)
    rows = workload.rows(step * options.documents, options.documents).slice(start, end - start)
    epochs = np.zeros(len(rows), np.int64)
    if unit is None:
        return workload.collator().collate(rows, epochs)
    return collate_canonical(workload.collator(), rows, epochs, start // unit, unit)


def checksum(train_step: TrainStep) -> str:
    """SHA-256 of the encoder's parameters."""
    found = hashlib.sha256()
    for parameter in train_step.encoder.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def train(
    comm: Communicator,
    options: argparse.Namespace,
    deterministic: bool,
    first: int,
    last: int,
    folder: str | None = None,
) -> dict[str, Any]:
    """Take the steps first..last, from the checkpoint of the step before and with one after the last if needed."""
    cpu = torch.device("cpu")
    before = memory.reset_peak(cpu)
    train_step = train_step_of(options, comm, deterministic)
    if folder is not None and first > 1:
        weights.load(checkpoint.checkpoint_path(Path(folder), first - 1), [train_step])
    for step in range(first, last + 1):
        train_step.step({"": batch_of(options, comm, step, deterministic)}, step)
    grown = memory.peak(cpu) - before
    if folder is not None:
        contents = weights.collect([train_step], keep=comm.rank == 0)
        if comm.rank == 0:
            done: dict[str, Any] = {"step": last, "documents": last * options.documents, "world_size": comm.size}
            state = RunState(**done, config_hash="", data_hash="", scores={}, files={})
            checkpoint.save(Path(folder), state, contents)
        comm.all_reduce_max(0)  # the next workers read it
    return {"checksum": checksum(train_step), "mib": grown}


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
    found, reduce = 0, dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        nonlocal found
        found += tensor.numel() * tensor.element_size()
        return reduce(tensor, *arguments, **named)

    dist.all_reduce = counting
    try:
        work()
    finally:
        dist.all_reduce = reduce
    return found


def changing(options: argparse.Namespace) -> str:
    """Checksum after a training whose number of workers changes twice."""
    cuts = [options.steps * number // len(_CHANGES) for number in range(len(_CHANGES) + 1)]
    with tempfile.TemporaryDirectory() as folder:
        for size, begin, end in zip(_CHANGES, cuts[:-1], cuts[1:], strict=True):
            ranks = gloo.run(size, train, options, True, begin + 1, end, folder)
    return str(ranks[0]["checksum"])


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("step.worlds", __doc__)
    options.add_argument(
        "--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=[32, 128], help="tokens, no special ones"
    )
    options.add_argument("--model", choices=models.SIZES, default="demo")
    options.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 7], help="numbers of workers")
    options.add_argument("--processes", type=int, default=2, help="workers of the ratios")
    options.add_argument("--documents", type=int, default=16, help="documents per step, over all workers")
    options.add_argument("--unit", type=int, default=1, help="documents of a canonical microbatch")
    options.add_argument("--microbatch-tokens", type=int, help="default: a worker's whole share")
    options.add_argument("--steps", type=int, default=6, help="steps of each training, at least 3")
    options.add_argument("--dropout", type=float, default=0.1)
    given = options.parse_args(arguments)
    if given.steps < len(_CHANGES):
        options.error(f"--steps {given.steps} is too small; give at least {len(_CHANGES)}")
    trained = {size: gloo.run(size, train, given, True, 1, given.steps) for size in given.worlds}
    worlds: list[dict[str, Any]] = [
        {"world": size, "checksum": checksum} for size, ranks in trained.items() for checksum in _distinct(ranks)
    ]
    worlds.append({"world": " -> ".join(map(str, _CHANGES)), "checksum": changing(given)})
    ordinary = gloo.run(given.processes, train, given, False, 1, given.steps)
    deterministic = trained.get(given.processes) or gloo.run(given.processes, train, given, True, 1, given.steps)
    measured = gloo.run(given.processes, turns, given)[0]
    plain, fixed = measured["seconds"]
    ratios = record.ratios(fixed, plain)
    settings = {key: value for key, value in vars(given).items() if key not in ("json", "commit")}
    figures = {
        "benchmark": "worlds",
        **settings,
        "worlds": worlds,
        "equal": len({world["checksum"] for world in worlds}) == 1,
        "ordinary_checksum": ordinary[0]["checksum"],
        "time_ratio": ratios["ratio_median"],
        "time_ratio_range": ratios["ratio_range"],
        "memory_ratio": round(max(r["mib"] for r in deterministic) / max(r["mib"] for r in ordinary), 4),
        "bytes_ratio": round(measured["bytes"][1] / max(1, measured["bytes"][0]), 4),
        "seconds": {"ordinary": statistics.median(plain), "bitwise": statistics.median(fixed)},
        "mib": {"ordinary": [r["mib"] for r in ordinary], "bitwise": [r["mib"] for r in deterministic]},
        "bytes": {"ordinary": measured["bytes"][0], "bitwise": measured["bytes"][1]},
        **record.facts("step.worlds", given.commit),
    }
    record.publish(figures, given.json)


def _distinct(ranks: list[dict[str, Any]]) -> list[str]:
    """Checksums of a training's workers: one, unless they differ."""
    return sorted({rank["checksum"] for rank in ranks})


if __name__ == "__main__":
    main()
