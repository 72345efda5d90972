"""Embeddings of held-out texts, computed by all workers together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainer.data.batches import SpanBatch
from trainer.model.encoder import Encoder
from trainer.objectives.base import Dense
from trainer.parallel.world import World

_CHUNK = 256  # spans in one forward


def embed_together(
    encoder: Encoder,
    total: int,
    batch_of: Callable[[slice], SpanBatch],
    layers: Sequence[Dense],
    world: World,
    device: torch.device,
) -> Tensor:
    """Embeddings as exported, `(total, H)`, in float64 on the CPU, the same on every worker; without dropout.

    Args:
        encoder: the encoder; it is left unchanged.
        total: number of spans.
        batch_of: packs the spans of a slice of `range(total)`.
        layers: layers behind the pooling that are exported.
        world: the workers.
        device: device of the encoder.
    """
    was_training = encoder.training
    encoder.eval()
    start, end = total * world.rank // world.size, total * (world.rank + 1) // world.size
    forwards = -(-(end - start) // _CHUNK)
    if encoder.sharded:  # forwards gather weights, so every worker runs the same number
        forwards = world.largest(forwards)
    width = layers[-1].linear.out_features if layers else encoder.hidden_size
    parts = [torch.empty(0, width, device=device, dtype=torch.float64)]
    with torch.no_grad():
        for number in range(forwards):
            first = start + number * _CHUNK
            found = encoder.embed(batch_of(slice(first, min(end, first + _CHUNK))).to(device))
            for layer in layers:
                found = nn.Sequential(layer.linear, layer.activation)(found.to(layer.linear.weight.dtype))
            parts.append(found.double())
        table = world.gather(torch.cat(parts), start, total)
    encoder.train(was_training)
    return table.cpu()
