"""Savings and cost of sharded parameters: tensors that a worker keeps between two steps, and the time of a step.

    python -m benchmarks.step.sharding --json OUT [--model distilroberta] [--processes 2] [--documents 4] [--steps 5]

The processes run on this machine's CPUs over gloo, one thread each. Memory figures are exact; times hold for this
network only. Both kinds of step take turns in the same processes, on the same batch, with the same weights.
"""

import argparse
import statistics
import time
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks import gloo, memory, record
from benchmarks.workload import models, packed
from declutr.trainer.data.plan import Plan
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.sharding import shard
from declutr.trainer.step.step import TrainStep


def kept_mib(train_step: TrainStep) -> dict[str, float]:
    """MiB of parameters, gradients and moments that this worker holds after a step."""
    parameters = list(train_step.encoder.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    moments = [value for p in parameters for value in train_step.optimizer.state[p].values()]
    found = {"parameters": _mib(parameters), "gradients": _mib(gradients), "moments": _mib(moments)}
    return {name: round(size, 3) for name, size in {**found, "all": sum(found.values())}.items()}


def _mib(tensors: list[Any]) -> float:
    """MiB of the memory behind tensors, each piece counted once."""
    held: list[Tensor] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(pieces.values()) / memory.MIB


def measure(comm: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure this worker's figures."""
    workload = packed.Workload.of(options, dropout=options.dropout)
    start, end = Plan(options.seed, options.documents, options.documents).slice(comm.rank, comm.size)
    batch = workload.batch(start, end - start)
    train_steps = {}
    for name in ("whole", "sharded"):
        encoder = workload.encoder()
        if name == "sharded":
            shard(encoder, comm)
        train_steps[name] = workload.train_step(encoder, options.microbatch_tokens, comm)
    losses = {
        name: train_step.step({"": batch}, 1).loss for name, train_step in train_steps.items()
    }  # creates the optimizer's state
    seconds: dict[str, list[float]] = {name: [] for name in train_steps}
    for number in range(options.steps):
        for name, train_step in train_steps.items():
            comm.all_reduce_max(0)  # so that all start together
            begun = time.perf_counter()
            losses[name] = train_step.step({"": batch}, number + 2).loss
            seconds[name].append(time.perf_counter() - begun)
    ratios = [after / before for before, after in zip(seconds["whole"], seconds["sharded"], strict=True)]
    kept = {name: kept_mib(train_step) for name, train_step in train_steps.items()}
    return {
        "kept_mib": kept,
        "kept_ratio": round(kept["sharded"]["all"] / kept["whole"]["all"], 4),
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "time_ratio_median": round(statistics.median(ratios), 3),
        "time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "loss_abs_diff": abs(losses["sharded"] - losses["whole"]),
        "tokens": batch.spans.num_tokens,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("step.sharding", __doc__)
    options.add_argument(
        "--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=[32, 512], help="tokens, no special ones"
    )
    options.add_argument("--model", choices=models.SIZES, default="distilroberta")
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--documents", type=int, default=4, help="documents per step, over all processes")
    options.add_argument("--microbatch-tokens", type=int, help="default: a worker's whole share")
    options.add_argument("--steps", type=int, default=5, help="steps of each kind, after a first one")
    options.add_argument("--dropout", type=float, default=0.1)
    given = options.parse_args(arguments)
    settings = {key: value for key, value in vars(given).items() if key not in ("json", "commit")}
    ranks = gloo.run(given.processes, measure, given)
    first = ranks[0]
    figures = {
        "benchmark": "sharding",
        **settings,
        **{key: first[key] for key in ("kept_ratio", "time_ratio_median", "time_ratio_range", "loss_abs_diff")},
        "ranks": ranks,
        **record.facts("step.sharding", given.commit),
    }
    record.publish(figures, given.json)


if __name__ == "__main__":
    main()
