"""Layers of an encoder on a GPU in half precision: weights cast once a step, one product for queries, keys and values.

Autocast casts every weight in every layer's forward, and a compiler makes a kernel of each cast: 12 of a layer's 25.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from declutr.trainer.torch_private import copy_all, versions

_PROJECTIONS = ("query", "key", "value"), ("q_lin", "k_lin", "v_lin")  # BERT's and RoBERTa's names; DistilBERT's
# Families whose attention reads its projections unchanged, and whose norms are behind the residual sums: elsewhere the
# sums themselves, or angles of positions, would have half precision.
_POST_NORM = {"bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert"}


class HalfWeights:
    """Copies of the weights of linear layers, and norms that return half precision; autocast alone uses both."""

    def __init__(
        self,
        body: nn.Module,  # the encoder without its head, changed in place
        family: str,  # its model type
        dtype: torch.dtype,  # of the copies
        packs: bool,  # attention reads keys and values behind the queries, `(..., 3 H)`
    ) -> None:
        attentions = dict(_attentions(body)) if packs and family in _POST_NORM else {}
        projections = {id(layer) for group in attentions.values() for layer in group}
        groups = [[layer] for layer in body.modules() if type(layer) is nn.Linear and id(layer) not in projections]
        self._weights, self._copies, buffers = list[Tensor](), list[Tensor](), []
        for group, name in product([*groups, *attentions.values()], ("weight", "bias")):
            if weights := [weight for layer in group if (weight := getattr(layer, name)) is not None]:
                copies = torch.cat(weights).detach().to(dtype)  # memory may not suffice: `body` is changed behind this
                buffers.append((group, f"{name}_copies", copies))
                self._weights += weights
                self._copies += copies.split([len(weight) for weight in weights])
        for layers, name, copies in buffers:
            layers[0].register_buffer(name, copies, persistent=False)
            layers[0].__class__, layers[0].layers = _Linear, layers  # type: ignore[assignment]
            for layer in layers[1:]:
                layer.__class__ = _Behind
        for attention in attentions:
            attention.packs = True  # type: ignore[assignment]
        for module in body.modules() if family in _POST_NORM else ():
            module.__class__ = _Norm if type(module) is nn.LayerNorm else module.__class__
        self._version = versions(self._weights)

    def follow(self) -> None:
        """Casts the weights if something has changed them."""
        if self._version != (version := versions(self._weights)):
            with torch.no_grad():
                copy_all(self._copies, self._weights)
            self._version = version


def _attentions(body: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Each attention whose queries, keys and values have as many numbers as their input, and these three layers."""
    for module in body.modules():
        for names in _PROJECTIONS:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear and layer.in_features == layer.out_features for layer in layers):
                yield module, layers  # type: ignore[misc]


class _Norm(nn.LayerNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        normed, kind = super().forward(hidden), hidden.device.type  # in float32
        return normed.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed


class _Linear(nn.Linear):
    layers: list[nn.Linear]  # itself, and those whose output is behind its own
    weight_copies: Tensor
    bias_copies: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        half = torch.is_autocast_enabled(hidden.device.type)
        weight = self._joined("weight", half)
        return F.linear(hidden, weight, self._joined("bias", half) if hasattr(self, "bias_copies") else None)

    def _joined(self, name: str, half: bool) -> Tensor:
        weights = [getattr(layer, name) for layer in self.layers]
        copies: Tensor = _Copies.apply(getattr(self, f"{name}_copies"), *weights) if half else torch.cat(weights)  # type: ignore[no-untyped-call]
        return copies


class _Behind(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden  # attention takes nothing but its shape


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, *weights: Tensor) -> Tensor:
        ctx.sizes = [len(weight) for weight in weights]
        return copies.view_as(copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *(part.float() for part in gradient.split(ctx.sizes))  # parameters are in float32
