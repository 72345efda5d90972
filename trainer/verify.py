"""`declutr verify-gradients CONFIG`: checks that a configuration's gradient does not depend on how it is computed.

One process with the whole batch at once is the reference. The same batch is then divided among several processes and
cut into microbatches of several sizes, with the configuration's own dropout, masks and losses. No Ray.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from transformers.utils import logging as transformers_logging

from declutr.trainer.build import build_parts, build_train_steps
from declutr.trainer.checkpoints.weights import step_parameters
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import fetched
from declutr.trainer.parallel.communicator import Communicator, full_tensor
from declutr.trainer.run import RunPlan
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.step import TrainStep

Precision = Literal["float32", "float64"]
# Splitting a sum changes its rounding; a larger difference is a mistake. Rounding in float32 grows with the number of
# summed tokens, so the limit of float32 is at least four times the distance between float32 and float64.
TOLERANCES: dict[Precision, float] = {"float64": 1e-10, "float32": 1e-5}
_ROUNDINGS = 4
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Case:
    """One way to compute the same gradient."""

    precision: Precision  # precision of parameters and arithmetic
    processes: int  # workers that share the batch
    microbatch_tokens: int | None  # largest number of tokens in one forward; None: a worker's whole share


@dataclass(frozen=True)
class Difference:
    """Difference between a case and one process with the whole batch at once."""

    case: Case  # the case
    loss: float  # absolute difference of the loss
    absolute: float  # largest absolute difference of a gradient's entry
    relative: float  # the same divided by the largest entry of the reference
    limit: float  # largest `relative` that counts as rounding

    @property
    def within(self) -> bool:
        """True if the difference is only rounding."""
        return self.relative <= self.limit


def verify(config: TrainConfig, documents: int, processes: list[int]) -> Iterator[Difference]:
    """Differences for float64 and float32, 1 process and each number of `processes`, and three microbatches.

    The batch has `documents` documents, at most those of the configuration, whose precisions are replaced.
    """
    size = min(documents, config.batch_documents)
    precisions: tuple[Precision, ...] = ("float64", "float32")
    references = {precision: _single(config, size, Case(precision, 1, None)) for precision in precisions}
    tokens = references["float64"][1]
    gradients = {precision: tensors for precision, (tensors, _) in references.items()}
    rounding = _distance(gradients["float32"], gradients["float64"])[1]
    limits = TOLERANCES | {"float32": max(TOLERANCES["float32"], _ROUNDINGS * rounding)}
    cuts = [None, max(1, tokens // 2), max(1, tokens // 7)]
    for number in [1, *processes]:
        cases = [Case(p, number, cut) for p in precisions for cut in cuts if (number, cut) != (1, None)]
        results = [_single(config, size, case)[0] for case in cases] if number == 1 else _group(config, size, cases)
        for case, result in zip(cases, results, strict=True):
            reference = gradients[case.precision]
            loss = float((result["loss"] - reference["loss"]).abs())
            yield Difference(case, loss, *_distance(result, reference), limits[case.precision])


def _distance(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, float]:
    """Largest difference of a gradient's entry, and the largest one relative to the largest entry of the reference.

    Encoder, objectives and frontends are compared separately, because their gradients differ in size; so are the train
    steps.
    """
    parts: dict[str, list[str]] = {}
    for name in reference:
        if name != "loss":
            parts.setdefault(_part(name), []).append(name)
    absolute, relative = [0.0], [0.0]
    for names in parts.values():
        difference = _largest([float((gradients[name] - reference[name]).abs().max()) for name in names])
        largest = _largest([float(reference[name].abs().max()) for name in names])
        absolute.append(difference)
        relative.append(difference / largest if largest else difference)
    return _largest(absolute), _largest(relative)


def _part(name: str) -> str:
    """The train step and module of a parameter: encoder, `objective`, `also.NAME.objective` or `also.NAME.frontend`."""
    train_step, _, parameter = name.rpartition(" ")
    if parameter.startswith("also."):
        return f"{train_step} {'.'.join(parameter.split('.')[:3])}"
    return f"{train_step} {'objective' if parameter.startswith('objective.') else 'encoder'}"


def _largest(values: list[float]) -> float:
    """The maximum, or NaN if any value is NaN, which Python's `max` may ignore."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _single(config: TrainConfig, size: int, case: Case) -> tuple[dict[str, Tensor], int]:
    train_steps, batch = _prepare(config, size, case, Communicator())
    return _gradients(train_steps, batch), batch[""].spans.num_tokens


def _group(config: TrainConfig, size: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Computes every case with one group of processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config.model_dump(mode="json"), size, [dataclasses.asdict(case) for case in cases], folder)
        # Not "spawn": gloo's threads may still run while such an interpreter shuts down, which aborts one sharded
        # process in ten ("terminate called without an active exception"). Children of the fork server skip this.
        start_processes(_rank, arguments, nprocs=cases[0].processes, start_method="forkserver")
        return [load_file(_result(folder, number)) for number in range(len(cases))]


def _result(folder: str, number: int) -> Path:
    return Path(folder) / f"gradients-{number}.safetensors"


def _rank(rank: int, config: dict[str, object], size: int, cases: list[dict[str, Any]], folder: str) -> None:
    """Runs one worker: joins the group and computes its share of each case; rank 0 writes the summed gradients."""
    comm = Communicator(rank, cases[0]["processes"])
    init = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=comm.size, timeout=_TIMEOUT)
    torch.set_num_threads(1)
    try:
        for number, case in enumerate(cases):
            gradients = _gradients(*_prepare(TrainConfig.model_validate(config), size, Case(**case), comm))
            if rank == 0:
                save_file(gradients, _result(folder, number))
    finally:
        dist.destroy_process_group()


def _prepare(
    config: TrainConfig, size: int, case: Case, comm: Communicator
) -> tuple[list[TrainStep], dict[str, RankBatch]]:
    """The configuration's train steps, and this rank's share of the run's first batch."""
    transformers_logging.disable_progress_bar()  # one per case and process
    scaling = config.scaling.model_copy(update={"reduce_dtype": "fp32"})  # `_gradients` sums after the last backward
    plan = RunPlan.of(config.model_copy(update={"precision": "fp32", "scaling": scaling}))
    parts = build_parts(plan, comm, getattr(torch, case.precision), Microbatch(case.microbatch_tokens))
    tasks = parts.tasks
    if case.precision == "float64":  # workers share a large loss, if its objective allows it; here this small one, too
        tasks = tuple(dataclasses.replace(task, shared_rows=0) for task in tasks)
    shares = {}
    for name, order in plan.orders.items():
        batch = size if not name else min(size, order.batch_documents)
        order = dataclasses.replace(order, batch_documents=batch, canonical_documents=None)
        epochs, documents = order.documents(0, 1, *order.slice(comm.rank, comm.size))
        collator = parts.collators[name]
        rows = fetched(plan.training_shards[name], documents, epochs, getattr(collator, "fetch", None))
        shares[name] = collator.collate(rows, epochs)
    return build_train_steps(plan, tasks, total_steps=1), shares


def _gradients(train_steps: list[TrainStep], batch: dict[str, RankBatch]) -> dict[str, Tensor]:
    """Summed gradients of each train step by parameter name, and the loss."""
    gradients: dict[str, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for train_step in train_steps:
        train_step.optimizer.zero_grad(set_to_none=True)
        results = train_step.gradients(batch, 1)
        params = step_parameters(train_step)
        params = {name: p for name, p in params.items() if p.requires_grad}
        train_step.comm.all_reduce_gradients(list(params.values()))
        for task, result in zip(train_step.tasks, results, strict=True):
            mlm = train_step.comm.all_reduce_sum(result.mlm_sum) / max(1, result.num_selected)
            loss = sum(result.terms.values()) + task.objective.config.mlm_weight * mlm
            total += task.weight * loss.detach()
        prefix = f"{train_step.name} " if train_step.name else ""
        gradients |= {prefix + name: full_tensor(p.grad).clone() for name, p in params.items() if p.grad is not None}
        for parameter in params.values():
            parameter.grad = None
    return {"loss": total.reshape(1), **gradients}
