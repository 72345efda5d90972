"""Freezing of an encoder's lower layers, so that only its last ones are trained."""

from typing import TYPE_CHECKING

from torch import nn

from declutr.common.errors import EncoderError
from declutr.trainer.model.language_model import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def frozen_parameters(model: "PreTrainedModel", num_trainable_layers: int | None) -> list[nn.Parameter]:
    """The parameters of the encoder before its last `num_trainable_layers` layers; none for None.

    Embeddings are among them, also where an MLM head shares them, and everything that all layers share, such as
    relative positions. A normalisation after the last layer is not.

    Raises:
        EncoderError: the encoder has fewer layers, or its layers share their weights.
    """
    if num_trainable_layers is None:
        return []
    layers = _layers(model)
    if num_trainable_layers > len(layers):
        raise EncoderError(
            f"num_trainable_layers = {num_trainable_layers}: the encoder has {len(layers)} layers; use at most "
            f"{len(layers)}, or null to train everything"
        )
    trained = {id(p) for layer in layers[-num_trainable_layers:] for p in layer.parameters()}
    parts = list(model.base_model.children())
    holder = next(number for number, part in enumerate(parts) if any(module is layers[-1] for module in part.modules()))
    trained |= {id(p) for part in parts[holder + 1 :] for p in part.parameters()}
    return [p for p in model.base_model.parameters() if id(p) not in trained]


def _layers(model: "PreTrainedModel") -> list[nn.Module]:
    """The layers of the encoder, from its input to its output."""
    count = int(model.config.num_hidden_layers)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise EncoderError(
        f"num_trainable_layers: the {count} layers of model type {model.config.model_type} share their weights; set it "
        f"to null, or use an encoder of type {', '.join(FAMILIES[:5])}"
    )
