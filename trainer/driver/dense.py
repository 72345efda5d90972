"""Steps behind the pooling, in the files from which sentence-transformers loads them."""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from declutr.common.storage import read_json, write_json
from declutr.trainer.model.behind import Dense, Normalize, Step


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
