"""Checkpoints: whole folders with checksums. "Latest" means the latest that verifies.

A checkpoint is `step-XXXXXXXX/` with encoder.safetensors (every parameter once), optimizer.safetensors (moments by
parameter name), objective.safetensors (the queue, if any) and state.json (RunState). Nothing in it is pickled.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.logs import get_logger
from common.storage import folder_aside, hash_file, read_json, write_json
from trainer.objectives import Declutr
from trainer.sharding import part_for, whole
from trainer.state import RunState

_NAME = re.compile(r"step-(\d{8})")
ENCODER, _OPTIMIZER, OBJECTIVE, _STATE = (
    "encoder.safetensors",
    "optimizer.safetensors",
    "objective.safetensors",
    "state.json",
)


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, altered, or does not fit the model."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def collect(
    encoder: nn.Module, optimizer: torch.optim.Optimizer, objective: Declutr, keep: bool = True
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each file of a checkpoint, whole and on the CPU. Every worker must ask: sharded ones are gathered.

    Args:
        encoder: whose parameters are saved.
        optimizer: whose moments are saved.
        objective: whose queue is saved.
        keep: False: take part in the gathering, but answer nothing.
    """
    files: dict[str, Mapping[str, Tensor]] = {
        ENCODER: dict(encoder.named_parameters()),
        _OPTIMIZER: _moments(encoder, optimizer),
        OBJECTIVE: objective.state_dict(),
    }
    return {file: _tensors(named, keep) for file, named in files.items()}


def save(folder: Path, state: RunState, contents: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Writes the checkpoint of `state.step`, whole or not at all; `state.files` is filled in here.

    Args:
        folder: of the run's checkpoints.
        state: of the run.
        contents: from `collect`.
    """
    path = checkpoint_path(folder, state.step)
    if path.exists():  # left by a run that died before it could report it, or broken: it is not trusted
        shutil.rmtree(path)
    with folder_aside(path) as aside:
        for name, tensors in contents.items():
            save_file(dict(tensors), aside / name)
        files = {file.name: hash_file(file) for file in sorted(aside.iterdir())}
        write_json(aside / _STATE, state.model_copy(update={"files": files}).model_dump(mode="json"))
    return path


def read_state(path: Path, verify: bool = True) -> RunState:
    """The state of a checkpoint, after its files were compared with their checksums.

    Args:
        path: the checkpoint's folder.
        verify: False: the record only, without reading the other files.

    Raises:
        CheckpointError: with what is missing or altered.
    """
    try:
        state = RunState.model_validate(read_json(path / _STATE))
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(f"{path}: {_STATE} is missing or unreadable ({error})") from error
    for name, expected in state.files.items() if verify else ():
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if hash_file(path / name) != expected:
            raise CheckpointError(f"{path}: {name} is truncated or altered (checksum differs)")
    return state


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, in order."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def find_latest(folder: Path) -> tuple[Path, RunState] | None:
    """The newest checkpoint that verifies; broken ones are named in the log and passed over."""
    for step in reversed(steps_in(folder)):
        path = checkpoint_path(folder, step)
        try:
            return path, read_state(path)
        except CheckpointError as error:
            get_logger().warning("passing over a broken checkpoint: %s", error)
    return None


def find_best(folder: Path, score: str, verify: bool = True) -> tuple[Path, RunState] | None:
    """The checkpoint that verifies with the highest value of a score; the earliest of equals."""
    best: tuple[Path, RunState] | None = None
    for step in steps_in(folder):
        path = checkpoint_path(folder, step)
        try:
            state = read_state(path, verify)
        except CheckpointError as error:
            get_logger().warning("passing over a broken checkpoint: %s", error)
            continue
        if score in state.scores and (best is None or state.scores[score] > best[1].scores[score]):
            best = path, state
    return best


def write_objective(path: Path, objective: Declutr) -> str:
    """Replaces the objective's state in a checkpoint that is being made; returns the file's checksum."""
    save_file(_tensors(objective.state_dict(), keep=True), path / OBJECTIVE)
    return hash_file(path / OBJECTIVE)


def prune(folder: Path, keep: Iterable[Path]) -> None:
    """Deletes every checkpoint folder that is not to be kept, and what killed writers left behind."""
    kept = set(keep)
    for path in [*folder.glob("step-*"), *folder.glob(".step-*.tmp")]:
        if path not in kept:
            shutil.rmtree(path)


def load_encoder(path: Path, encoder: nn.Module) -> None:
    """Copies a checkpoint's parameters into the encoder.

    Raises:
        CheckpointError: names or shapes differ.
    """
    _copy(load_file(path / ENCODER), dict(encoder.named_parameters()), path)


def load(path: Path, encoder: nn.Module, optimizer: torch.optim.Optimizer, objective: Declutr) -> None:
    """Restores encoder, optimizer and objective from a checkpoint.

    Raises:
        CheckpointError: names or shapes differ.
    """
    load_encoder(path, encoder)
    stored = load_file(path / _OPTIMIZER)
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in encoder.named_parameters():
        prefix = f"{name}:"
        moments = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        if moments:
            optimizer.state[parameter] = {
                # AdamW keeps its step counter on the CPU, but beside the parameter when it is fused
                key: (value.to(parameter.device) if fused else value) if key == "step" else part_for(value, parameter)
                for key, value in moments.items()
            }
    device = next(encoder.parameters()).device
    objective.load_state_dict({name: value.to(device) for name, value in load_file(path / OBJECTIVE).items()})


def _moments(encoder: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}:{key}": value
        for name, parameter in encoder.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _tensors(named: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    kept = {}
    for name, tensor in named.items():
        full = whole(tensor.detach())  # one at a time: a worker that keeps nothing holds one tensor at most
        if keep:
            kept[name] = full.cpu().contiguous()
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
