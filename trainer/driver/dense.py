"""Layers of an objective behind the pooling, in the files from which sentence-transformers loads them."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from common.storage import read_json, write_json
from trainer.objectives.base import Dense


def write_dense(folder: Path, layers: Sequence[Dense]) -> None:
    """Adds linear layers with their activations to an exported encoder, in their order behind the pooling."""
    modules = read_json(folder / "modules.json")
    for number, layer in enumerate(layers, start=len(modules)):
        name = f"{number}_Dense"
        (folder / name).mkdir()
        linear, kind = layer.linear, type(layer.activation)
        settings = {
            "in_features": linear.in_features,
            "out_features": linear.out_features,
            "bias": linear.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__qualname__}",
        }
        write_json(folder / name / "config.json", settings)
        weights = {f"linear.{key}": value.detach().cpu().contiguous() for key, value in linear.state_dict().items()}
        save_file(weights, folder / name / "model.safetensors")
        entry = {"idx": number, "name": str(number), "path": name, "type": "sentence_transformers.models.Dense"}
        modules.append(entry)
    write_json(folder / "modules.json", modules)
