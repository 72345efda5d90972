"""Tensors of a run: copied to the files of a checkpoint, and restored from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from declutr.common.errors import CheckpointError
from declutr.trainer.checkpoints.checkpoint import ENCODER, FRONTEND, OBJECTIVE, OPTIMIZER, Contents
from declutr.trainer.objectives.base import Objective
from declutr.trainer.parallel.communicator import full_tensor, shard_like
from declutr.trainer.step.step import TrainStep


def collect(
    train_steps: Sequence[TrainStep],  # the train steps of the run
    keep: bool = True,  # false: the worker only takes part in the gathering, and gets no tensors
    # an earlier result that is no longer needed; overwriting it takes a fraction of the time that new memory takes.
    memory: Contents | None = None,
) -> Contents:
    """Copies the tensors of each file, whole, to the CPU. Every worker must call it, as it gathers sharded ones."""
    memory, encoder = memory or {}, train_steps[0].encoder
    files: dict[str, Mapping[str, Tensor]] = {ENCODER: dict(encoder.named_parameters())}
    for train_step in train_steps:
        files[_file(train_step.name, OPTIMIZER)] = {
            f"{name}:{key}": value
            for name, parameter in step_parameters(train_step).items()
            for key, value in train_step.optimizer.state.get(parameter, {}).items()
        }
        for task in train_step.tasks:
            files[_file(task.name, OBJECTIVE)] = task.objective.state()
            if task.frontend is not None:
                files[_file(task.name, FRONTEND)] = dict(task.frontend.named_parameters())
    contents = {file: _copies(tensors, keep, memory.get(file, {})) for file, tensors in files.items()}
    if next(encoder.parameters()).is_cuda:
        torch.cuda.synchronize()  # waits for the copies from the GPU
    return contents


def _file(name: str, kind: str) -> str:
    """Name of a task's file."""
    return f"{name}.{kind}" if name else kind


def load_parameters(path: Path, encoder: nn.Module) -> None:
    """Copies a checkpoint's parameters into the encoder."""
    _copy(load_file(path / ENCODER), dict(encoder.named_parameters()), path)


def load(path: Path, train_steps: Sequence[TrainStep]) -> None:
    """Restores encoder, optimizers, objectives and frontends from a checkpoint; CheckpointError if one does not fit.

    Tensors that stay on the CPU are cloned: tensors of `load_file` map the file, so a deleted checkpoint would occupy
    disk space while one of them exists.
    """
    load_parameters(path, train_steps[0].encoder)
    for train_step in train_steps:
        file = path / _file(train_step.name, OPTIMIZER)
        _load_moments(file, step_parameters(train_step), train_step.optimizer)
        device = next(train_step.encoder.parameters()).device
        for task in train_step.tasks:
            load_objective(path, task.objective, device, _file(task.name, OBJECTIVE))
            file = path / _file(task.name, FRONTEND)
            if file.is_file() != (task.frontend is not None):
                has = "has a frontend, which the task lacks" if file.is_file() else "has no frontend for the task"
                raise CheckpointError(f"{path}: {has} {task.name}")
            if task.frontend is not None:
                _copy(load_file(file), dict(task.frontend.named_parameters()), file)


def _load_moments(file: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Restores the moments of an optimizer."""
    stored = load_file(file)
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in parameters.items():
        prefix = f"{name}:"
        moments = {key.removeprefix(prefix): value.clone() for key, value in stored.items() if key.startswith(prefix)}
        if moments:
            optimizer.state[parameter] = {
                # AdamW keeps its step counter on the CPU, but with the parameter when it is fused
                key: (value.to(parameter.device) if fused else value) if key == "step" else shard_like(value, parameter)
                for key, value in moments.items()
            }


def load_objective(
    path: Path, objective: Objective[Any], device: torch.device | None = None, name: str = OBJECTIVE
) -> None:
    """Restores an objective's state from the file `name` of a checkpoint, on the CPU without a device."""
    try:
        objective.restore({name: value.clone().to(device) for name, value in load_file(path / name).items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {name} does not fit the objective: {error}") from error


def step_parameters(train_step: TrainStep) -> dict[str, nn.Parameter]:
    """Parameters of an update by the name under which a checkpoint keeps their moments."""
    parameters = dict(train_step.encoder.named_parameters())
    for task in train_step.tasks:
        prefix = f"also.{task.name}." if task.name else ""
        for part, module in (("objective", task.objective), ("frontend", task.frontend)):
            if module is not None:
                parameters |= {f"{prefix}{part}.{name}": weight for name, weight in module.named_parameters()}
    return parameters


def _copies(tensors: Mapping[str, Tensor], keep: bool, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())  # one at a time, so a worker that keeps nothing holds at most one tensor
        if keep:  # after the gathering, in which every rank takes part
            place = memory.get(name)
            if place is None or place.shape != full.shape or place.dtype != full.dtype:
                # a copy to other memory would wait in spite of `non_blocking`
                place = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
            kept[name] = place.copy_(full, non_blocking=True)
    return kept


def _copy(stored: Mapping[str, Tensor], targets: Mapping[str, nn.Parameter], path: Path) -> None:
    if set(stored) != set(targets):  # both ways: a missing one would stay random
        raise CheckpointError(f"{path}: parameters differ from the model's: {sorted(set(stored) ^ set(targets))[:6]}")
    with torch.no_grad():
        for name, parameter in targets.items():
            if stored[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(stored[name].shape)}, not {list(parameter.shape)}"
                )
            parameter.copy_(shard_like(stored[name], parameter))
