"""Tensors of a run: copied to the files of a checkpoint, and restored from them."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.console.logs import get_logger
from trainer.checkpoints.checkpoint import ENCODER, FRONTEND, OBJECTIVE, OPTIMIZER, CheckpointError, Contents
from trainer.objectives.base import Objective
from trainer.parallel.sharding import part_for, whole
from trainer.step.branch import Branch
from trainer.step.step import Stepper


def collect(
    encoder: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective[Any],
    keep: bool = True,
    memory: Contents | None = None,
    turns: Sequence[Stepper] = (),
) -> Contents:
    """Copies the tensors of each file, whole, to the CPU. Every worker must call it, because it gathers sharded ones.

    Args:
        encoder: of the run.
        optimizer: of the main branch.
        objective: of the main branch.
        keep: false: the worker only takes part in the gathering, and gets no tensors.
        memory: an earlier result that is no longer needed; overwriting it takes a fraction of the time that new memory
            takes.
        turns: the steppers of the run, if it has additional branches.
    """
    memory = memory or {}
    joined, branches = _additional(turns)
    files: dict[str, Mapping[str, Tensor]] = {
        ENCODER: dict(encoder.named_parameters()),
        OPTIMIZER: _moments(trained_parameters(encoder, objective, joined), optimizer),
        OBJECTIVE: objective.state(),
    }
    for branch in branches:
        files[f"{branch.name}.{OBJECTIVE}"] = branch.objective.state()
        if branch.frontend is not None:
            files[f"{branch.name}.{FRONTEND}"] = dict(branch.frontend.named_parameters())
    for turn in turns[:-1]:
        files[f"{turn.name}.{OPTIMIZER}"] = _moments(turn_parameters(turn), turn.optimizer)
    contents = {file: _copies(named, keep, memory.get(file, {})) for file, named in files.items()}
    if next(encoder.parameters()).is_cuda:
        torch.cuda.synchronize()  # waits for the copies from the GPU
    return contents


def load_parameters(path: Path, encoder: nn.Module) -> None:
    """Copies a checkpoint's parameters into the encoder.

    Raises:
        CheckpointError: names or shapes differ.
    """
    _copy(load_file(path / ENCODER), dict(encoder.named_parameters()), path)


def load(
    path: Path,
    encoder: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective[Any],
    turns: Sequence[Stepper] = (),
) -> None:
    """Restores encoder, optimizer and objective from a checkpoint, and those of additional branches.

    Tensors that stay on the CPU are cloned: tensors of `load_file` map the file, so a deleted checkpoint would occupy
    disk space while one of them exists.

    Raises:
        CheckpointError: names or shapes differ.
    """
    load_parameters(path, encoder)
    joined, branches = _additional(turns)
    _load_moments(path / OPTIMIZER, trained_parameters(encoder, objective, joined), optimizer)
    device = next(encoder.parameters()).device
    load_objective(path, objective, device)
    for branch in branches:
        load_branch(path, branch, device)
    for turn in turns[:-1]:
        if (path / f"{turn.name}.{OPTIMIZER}").is_file():
            _load_moments(path / f"{turn.name}.{OPTIMIZER}", turn_parameters(turn), turn.optimizer)


def load_branch(path: Path, branch: Branch, device: torch.device | None = None) -> None:
    """Restores the objective and the frontend of an additional branch, if the checkpoint has that branch.

    Raises:
        CheckpointError: they do not fit.
    """
    if not (path / f"{branch.name}.{OBJECTIVE}").is_file():  # its state lists all files: this is a fork's first one
        get_logger().info("%s has no branch %s, which starts with new weights", path, branch.name)
        return
    load_objective(path, branch.objective, device, f"{branch.name}.{OBJECTIVE}")
    file = path / f"{branch.name}.{FRONTEND}"
    if file.is_file() != (branch.frontend is not None):
        has = "has a frontend, which the branch lacks" if file.is_file() else "has no frontend for the branch"
        raise CheckpointError(f"{path}: {has} {branch.name}")
    if branch.frontend is not None:
        _copy(load_file(file), dict(branch.frontend.named_parameters()), file)


def _additional(turns: Sequence[Stepper]) -> tuple[Sequence[Branch], list[Branch]]:
    """The branches that join the main update, and all additional ones."""
    joined = turns[-1].joined if turns else ()
    return joined, [*turns[:-1], *joined]


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
                key: (value.to(parameter.device) if fused else value) if key == "step" else part_for(value, parameter)
                for key, value in moments.items()
            }


def load_objective(
    path: Path, objective: Objective[Any], device: torch.device | None = None, name: str = OBJECTIVE
) -> None:
    """Restores an objective's state from the file `name` of a checkpoint, on the CPU without a device.

    Raises:
        CheckpointError: it does not fit the objective.
    """
    try:
        objective.restore({name: value.clone().to(device) for name, value in load_file(path / name).items()})
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {name} does not fit the objective: {error}") from error


def trained_parameters(
    encoder: nn.Module, objective: nn.Module, joined: Sequence[Branch] = ()
) -> dict[str, nn.Parameter]:
    """Parameters of an update by the name under which a checkpoint keeps their moments."""
    own = {f"objective.{name}": parameter for name, parameter in objective.named_parameters()}
    others = [own_parameters(branch) for branch in joined]
    return reduce(or_, others, dict(encoder.named_parameters()) | own)


def turn_parameters(turn: Stepper) -> dict[str, nn.Parameter]:
    """Parameters of a turn's update by name."""
    if turn.name:
        return dict(turn.encoder.named_parameters()) | own_parameters(turn)
    return trained_parameters(turn.encoder, turn.objective, turn.joined)


def own_parameters(branch: Branch) -> dict[str, nn.Parameter]:
    """Parameters of an additional branch's objective and frontend by name; files of checkpoints have these names."""
    parts = {"objective": branch.objective, "frontend": branch.frontend}
    return {
        f"also.{branch.name}.{part}.{name}": parameter
        for part, module in parts.items()
        if module is not None
        for name, parameter in module.named_parameters()
    }


def _moments(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}:{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _copies(named: Mapping[str, Tensor], keep: bool, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = {}
    for name, tensor in named.items():
        full = whole(tensor.detach())  # one at a time, so a worker that keeps nothing holds at most one tensor
        if keep:
            place = memory.get(name)
            if place is None or place.shape != full.shape or place.dtype != full.dtype:
                place = torch.empty(full.shape, dtype=full.dtype, pin_memory=full.is_cuda)
            kept[name] = place.copy_(full, non_blocking=True)
    return kept


def _copy(stored: Mapping[str, Tensor], wanted: Mapping[str, nn.Parameter], path: Path) -> None:
    if set(stored) != set(wanted):
        raise CheckpointError(f"{path}: parameters differ from the model's: {sorted(set(stored) ^ set(wanted))[:6]}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            if stored[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(stored[name].shape)}, not {list(parameter.shape)}"
                )
            parameter.copy_(part_for(stored[name], parameter))
