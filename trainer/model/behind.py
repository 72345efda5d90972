"""Steps behind pooling, as sentence-transformers computes, loads, stores them. Legend: S spans, D embedding size."""

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from declutr.common.console.logs import get_logger
from declutr.common.errors import DamagedError, EncoderError
from declutr.common.hub import hub_or_cache
from declutr.common.storage import read_json, read_record, write_json

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.Sigmoid": nn.Sigmoid,
}  # activations of dense layers, by the names that files have
DAMAGE = (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)
"""Errors that the libraries raise for files that are damaged, cut short, or of another model."""
_MOST_FEATURES = 2**31
_SHOWN_CHARACTERS = 40
_DENSE = ("in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    "use_residual")  # fmt: skip


class Normalize(nn.Module):
    """e / |e|; a null vector stays null."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map `(S, D)` to `(S, D)`."""
        return F.normalize(embeddings, dim=-1)


class Dense(nn.Sequential):
    """A linear layer with its activation, such as `nn.Tanh()` or `nn.Identity()`."""

    def __init__(self, linear: nn.Linear, activation: nn.Module) -> None:
        super().__init__(linear, activation)

    @property
    def linear(self) -> nn.Linear:
        """The linear layer."""
        layer = self[0]
        assert isinstance(layer, nn.Linear)
        return layer


Step = Dense | Normalize


def write_steps(folder: Path, steps: Iterable[nn.Module]) -> None:
    """Adds `Step`s to an exported encoder, in their order, without a normalisation of what is normalised already."""
    modules = read_json(folder / "modules.json")
    scaled = False
    for step in steps:
        if isinstance(step, Normalize) and scaled:  # |e| is 1 already
            continue
        scaled = isinstance(step, Normalize)
        kind = type(step).__name__
        name = f"{len(modules)}_{kind}"
        (folder / name).mkdir()
        if isinstance(step, Dense):
            linear, activation = step.linear, type(step[1])
            settings = {
                "in_features": linear.in_features,
                "out_features": linear.out_features,
                "bias": linear.bias is not None,
                "activation_function": f"{activation.__module__}.{activation.__qualname__}",
            }
            write_json(folder / name / "config.json", settings)
            weights = {f"linear.{key}": value.detach().cpu().contiguous() for key, value in linear.state_dict().items()}
            save_file(weights, folder / name / "model.safetensors")
        entry = {"idx": len(modules), "name": str(len(modules)), "path": name}
        modules.append(entry | {"type": f"sentence_transformers.models.{kind}"})
    write_json(folder / "modules.json", modules)


def kind_of(name: str) -> str:
    """The name of a class of sentence-transformers without its modules, which differ by version; others as they are."""
    package, _, _ = name.partition(".")
    return name.rpartition(".")[2] if package == "sentence_transformers" else name


def unread(
    where: str,  # the file
    settings: Mapping[str, Any],  # its content
    # keys that are read, without values; others with the values at which they make no difference.
    neutral: Mapping[str, Sequence[Any]],
) -> None:
    """Names the settings of a file that change nothing here."""
    keys = [
        key for key, value in settings.items() if key not in neutral or (neutral[key] and value not in neutral[key])
    ]
    if keys:
        _warn_of_keys(where, ", ".join(f"{key} = {str(settings[key])[:_SHOWN_CHARACTERS]}" for key in sorted(keys)))


@cache  # a folder is read several times
def _warn_of_keys(where: str, keys: str) -> None:
    get_logger().warning("%s: not read: %s", where, keys)


@dataclass(frozen=True)
class ModuleFiles:
    """The modules that the files of a sentence-transformers folder, or of a name at the hub, describe."""

    find: Callable[[str], Path | None]  # path of one of the files by its name; None if there is none

    def modules(self) -> list[tuple[str, str]] | None:
        """Kind and folder of each module of modules.json, in order; None without that file.

        A kind is the class's name in sentence-transformers, or the whole name of a class of another package: code that
        comes with a model may have any name.
        """
        entries = self.settings("modules.json", list[dict[str, Any]])
        if entries is None:
            return None
        modules = [(kind_of(str(entry.get("type", ""))), str(entry.get("path", ""))) for entry in entries]
        if outside := [folder for _, folder in modules if Path(folder).is_absolute() or ".." in Path(folder).parts]:
            raise DamagedError(f"modules.json names {outside[0]}, which is outside of the encoder's folder")
        return modules

    def settings(self, name: str, kind: Any = dict[str, Any]) -> Any:
        """Content of a small JSON file; None if it does not exist."""
        path = self.find(name)
        return None if path is None else read_record(path, kind)

    def dense(self, folder: str) -> Dense:
        """Load the dense layer of a module's folder."""
        settings = self.settings(f"{folder}/config.json")
        path = self.find(f"{folder}/model.safetensors") or self.find(f"{folder}/pytorch_model.bin")
        if settings is None or path is None:
            raise DamagedError(
                f"{folder}/config.json or {folder}/model.safetensors is missing; the folder is incomplete"
            )
        unread(str(self.find(f"{folder}/config.json")), settings, dict.fromkeys(_DENSE, ()))
        activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
        plain = settings.get("module_input_name", "sentence_embedding") == "sentence_embedding"
        plain = plain and settings.get("module_output_name", "sentence_embedding") in (None, "sentence_embedding")
        if activation not in ACTIVATIONS or settings.get("use_residual") or not plain:
            raise EncoderError(
                f"{self.find(f'{folder}/config.json')}: dense layer with {activation}; supported are layers of the "
                f"sentence embedding without residual, with {', '.join(kind.__name__ for kind in ACTIVATIONS.values())}"
            )
        sizes = settings.get("in_features"), settings.get("out_features")
        if not all(type(size) is int and 0 < size < _MOST_FEATURES for size in sizes):
            raise DamagedError(
                f"{folder}/config.json has in_features and out_features of {sizes[0]!r} and {sizes[1]!r}; they must be "
                f"numbers from 1 to {_MOST_FEATURES - 1:,}"
            )
        with torch.device("meta"):  # no memory for sizes that the weights do not have
            layer = nn.Linear(settings["in_features"], settings["out_features"], bias=bool(settings.get("bias", True)))
        try:
            pickled = path.suffix == ".bin"
            # weights only: a pickle may run any code
            weights = torch.load(path, map_location="cpu", weights_only=True) if pickled else load_file(path)
            if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
                raise ValueError("it is no table of tensors")
            state = {key.removeprefix("linear."): value.float() for key, value in weights.items()}
            layer.load_state_dict(state, assign=True)
        except DAMAGE as error:
            cause = " ".join(str(error).split())
            raise DamagedError(
                f"{path} does not hold the weights that its config.json describes ({cause}); it is damaged or of "
                "another model"
            ) from error
        return Dense(layer.requires_grad_(), ACTIVATIONS[activation]())

    def steps(self, modules: Iterable[tuple[str, str]]) -> list[Step]:
        """The dense layers and normalisations of modules; other kinds are passed over."""
        loaders: dict[str, Callable[[str], Step]] = {"Dense": self.dense, "Normalize": lambda _: Normalize()}
        return [loaders[kind](folder) for kind, folder in modules if kind in loaders]


def _pretrained_files(pretrained: str) -> ModuleFiles:
    """Files of a folder or name as transformers finds them; none if the hub cannot be asked for one."""
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        with hub_or_cache():
            path = cached_file(pretrained, name, **lenient)
        return None if path is None else Path(path)

    return ModuleFiles(find)


def read_behind(pretrained: str | None) -> list[Step]:
    """Dense layers of a pretrained encoder to be trained, normalisations before them; a last one changes no cosine."""
    if pretrained is None:
        return []
    files = _pretrained_files(pretrained)
    steps = files.steps(files.modules() or [])
    while steps and isinstance(steps[-1], Normalize):  # an export without it has the same cosines
        steps.pop()
    return steps


def read_prompts(pretrained: str | None) -> dict[str, str]:
    """The prompts that a pretrained encoder declares, by name; none for one from scratch."""
    settings = _pretrained_files(pretrained).settings("config_sentence_transformers.json") if pretrained else None
    prompts = (settings or {}).get("prompts") or {}
    if not isinstance(prompts, dict):
        raise DamagedError(f"{pretrained}: config_sentence_transformers.json: its prompts must be texts by name")
    return {name: text for name, text in prompts.items() if isinstance(text, str) and text}


_TAKEN_OVER = ("Transformer", "Pooling", "Dense", "Normalize")
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


def left_out(
    pretrained: str | None,  # name or folder of the encoder; None for training from scratch
    pooling: str,  # pooling of the run
) -> str | None:
    """A message about modules of a sentence-transformers folder that the run does not use, or None."""
    if pretrained is None:
        return None
    files = _pretrained_files(pretrained)
    try:
        kinds = dict(files.modules() or [])
        remarks = [f"its module {kind} is not used" for kind in kinds if kind not in _TAKEN_OVER]
        own = files.settings(f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else None
    except DamagedError as error:
        return f"encoder.pretrained = {pretrained}: {error}; its pooling is unknown"
    if own and not (own.get("pooling_mode") == pooling or own.get(f"pooling_mode_{_MODES.get(pooling)}")):
        remarks.append(f"its pooling differs from encoder.pooling = {pooling}")
    if not remarks:
        return None
    return (
        f"encoder.pretrained = {pretrained}: {', '.join(remarks)}; initial embeddings differ from those of that encoder"
    )
