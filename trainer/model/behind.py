"""Steps behind the pooling of a sentence encoder, as sentence-transformers computes, loads and stores them.

Legend: S spans, D embedding size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from declutr.common.errors import DamagedError
from declutr.common.hub import hub_or_cache
from declutr.common.storage import read_json, read_record, write_json

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}
"""Activations of dense layers, by the names that files have."""
_MOST_FEATURES = 2**31


class Normalize(nn.Module):
    """e / |e|; a null vector stays null."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map `(S, D)` to `(S, D)`."""
        return F.normalize(embeddings, dim=-1)


@dataclass(frozen=True)
class Dense:
    """A linear layer with its activation, such as `nn.Tanh()` or `nn.Identity()`."""

    linear: nn.Linear
    activation: nn.Module


Step = Dense | Normalize


def modules_of(steps: Iterable[Step]) -> nn.Sequential:
    """The steps as one module; a dense layer is a linear layer and its activation."""
    return nn.Sequential(
        *(nn.Sequential(step.linear, step.activation) if isinstance(step, Dense) else step for step in steps)
    )


def steps_of(modules: nn.Sequential) -> list[Step]:
    """The steps of which `modules_of` made a module.

    Raises:
        TypeError: a module is of another kind.
    """
    steps: list[Step] = []
    for module in modules:
        if isinstance(module, Normalize):
            steps.append(module)
        elif isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear):
            steps.append(Dense(module[0], module[1]))
        else:
            raise TypeError(f"{type(module).__name__} is no step behind a pooling")
    return steps


def load_dense(settings: dict[str, Any], path: Path, where: str) -> Dense:
    """Loads a dense layer from its files.

    Args:
        settings: its config.json.
        path: its weights.
        where: names it in messages.

    Raises:
        ValueError: it is of a kind that is not supported, or its weights are not those that the settings describe.
        OSError, SafetensorError, UnpicklingError: the weights are damaged.
    """
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    plain = settings.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    plain = plain and settings.get("module_output_name", "sentence_embedding") in (None, "sentence_embedding")
    if activation not in ACTIVATIONS or settings.get("use_residual") or not plain:
        raise ValueError(f"its dense layer {where} ({activation}) is of a kind that is not supported")
    sizes = settings.get("in_features"), settings.get("out_features")
    if not all(type(size) is int and 0 < size < _MOST_FEATURES for size in sizes):
        raise ValueError(
            f"{where}/config.json has in_features and out_features of {sizes[0]!r} and {sizes[1]!r}; they must be "
            f"numbers from 1 to {_MOST_FEATURES - 1:,}"
        )
    with torch.device("meta"):  # no memory for sizes that the weights do not have
        layer = nn.Linear(settings["in_features"], settings["out_features"], bias=bool(settings.get("bias", True)))
    pickled = path.suffix == ".bin"
    weights = torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} is no table of tensors")
    state = {key.removeprefix("linear."): value.float() for key, value in weights.items()}
    layer.load_state_dict(state, assign=True)
    return Dense(layer.requires_grad_(), ACTIVATIONS[activation]())


def write_steps(folder: Path, steps: Sequence[Step]) -> None:
    """Adds dense layers with their activations, and normalisations, to an exported encoder, in their order.

    A normalisation of what is normalised already is left out.
    """
    modules = read_json(folder / "modules.json")
    scaled = False
    for step in steps:
        if isinstance(step, Normalize) and scaled:
            continue
        scaled = isinstance(step, Normalize)
        kind = type(step).__name__
        name = f"{len(modules)}_{kind}"
        (folder / name).mkdir()
        if isinstance(step, Dense):
            _write_dense(folder / name, step)
        entry = {"idx": len(modules), "name": str(len(modules)), "path": name}
        modules.append(entry | {"type": f"sentence_transformers.models.{kind}"})
    write_json(folder / "modules.json", modules)


def _write_dense(folder: Path, layer: Dense) -> None:
    linear, kind = layer.linear, type(layer.activation)
    settings = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{kind.__module__}.{kind.__qualname__}",
    }
    write_json(folder / "config.json", settings)
    weights = {f"linear.{key}": value.detach().cpu().contiguous() for key, value in linear.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


# Parts of a sentence-transformers folder: the steps behind its pooling, and what training does not use.


_TAKEN_OVER = ("Transformer", "Pooling", "Dense", "Normalize")
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


def read_behind(pretrained: str | None) -> list[Step]:
    """The dense layers of a pretrained encoder, and normalisations before the last of them; trained with it.

    A normalisation at the end is left out, because cosines do not change by it.

    Raises:
        ValueError: a dense layer is damaged or of a kind that is not supported.
    """
    steps: list[Step] = []
    if pretrained is None:
        return steps
    modules = _read(pretrained, "modules.json", list[dict[str, Any]]) or []
    for module in modules:
        kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Dense":
            if Path(folder).is_absolute() or ".." in Path(folder).parts:
                raise ValueError(f"modules.json names {folder}, which is outside of the encoder's folder")
            settings = _read(pretrained, f"{folder}/config.json", dict[str, Any])
            weights = _path(pretrained, f"{folder}/model.safetensors")
            if settings is None or weights is None:
                raise ValueError(f"its dense layer {folder} lacks config.json or model.safetensors")
            steps.append(load_dense(settings, weights, folder))
    while steps and isinstance(steps[-1], Normalize):
        steps.pop()
    return steps


def left_out(pretrained: str | None, pooling: str) -> str | None:
    """A message about modules of a sentence-transformers folder that the run does not use, or None.

    Args:
        pretrained: name or folder of the encoder; None for training from scratch.
        pooling: pooling of the run.
    """
    if pretrained is None:
        return None
    try:
        modules = _read(pretrained, "modules.json", list[dict[str, Any]]) or []
        kinds = {str(module.get("type", "")).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
        remarks = [f"its module {kind} is not used" for kind in kinds if kind not in _TAKEN_OVER]
        own = _read(pretrained, f"{kinds['Pooling']}/config.json", dict[str, Any]) if "Pooling" in kinds else None
    except DamagedError as error:
        return f"encoder.pretrained = {pretrained}: {error}; its pooling is unknown"
    if own and not (own.get("pooling_mode") == pooling or own.get(f"pooling_mode_{_MODES.get(pooling)}")):
        remarks.append(f"its pooling differs from encoder.pooling = {pooling}")
    if not remarks:
        return None
    return (
        f"encoder.pretrained = {pretrained}: {', '.join(remarks)}; initial embeddings differ from those of that encoder"
    )


def _read(pretrained: str, name: str, kind: Any) -> Any:
    """Reads a small file of the encoder; None if it does not exist.

    Raises:
        DamagedError: the file is not JSON of that kind.
    """
    path = _path(pretrained, name)
    return None if path is None else read_record(path, kind)


def _path(pretrained: str, name: str) -> Path | None:
    """Path of a file of the encoder; None if it does not exist."""
    from transformers.utils import cached_file

    with hub_or_cache():
        path = cached_file(
            pretrained, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    return None if path is None else Path(path)
