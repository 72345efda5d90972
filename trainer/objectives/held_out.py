"""Held-out rows, chosen by the seed, and their embeddings, computed by all workers together."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.data.plan import permute
from declutr.trainer.model.behind import Dense
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.parallel.communicator import Communicator

_CHUNK = 256  # spans in one forward
# An "epoch" that training never reaches: what it draws for held-out rows is the same at every validation.
HELD_OUT_EPOCH = 2**32 - 1


def held_out_rows(held_out: ShardSet, max_rows: int, seed: int) -> NDArray[np.int64]:
    """Numbers of at most `max_rows` held-out rows, chosen by the run's seed, ascending.

    Of copies, which several corpora may hold, one row stays: no retrieval could tell them apart.
    """
    available = held_out.num_documents
    chosen = min(max_rows, available)
    rows = np.sort(permute(seed, np.full(chosen, HELD_OUT_EPOCH), np.arange(chosen), available))
    _, firsts = np.unique(document_keys(held_out.take(rows)), return_index=True)
    return rows[np.sort(firsts)]


def embed_together(
    encoder: Encoder,
    total: int,
    batch_of: Callable[[slice], SpanBatch],
    layers: Sequence[Dense],
    comm: Communicator,
    device: torch.device,
) -> Tensor:
    """Embeddings as exported, `(total, H)`, in float64 on the CPU, the same on every worker; without dropout.

    Args:
        encoder: the encoder; it is left unchanged.
        total: number of spans.
        batch_of: packs the spans of a slice of `range(total)`.
        layers: layers behind the pooling that are exported.
        comm: the workers.
        device: device of the encoder.
    """
    width = layers[-1].linear.out_features if layers else encoder.output_size

    def embed(part: slice) -> Tensor:
        embeddings = encoder.embed(batch_of(part).to(device))
        for layer in layers:
            embeddings = nn.Sequential(layer.linear, layer.activation)(embeddings.to(layer.linear.weight.dtype))
        return embeddings

    return compute_together(encoder, total, width, embed, comm, device, _CHUNK)


def compute_together(
    encoder: Encoder,
    total: int,
    width: int,
    rows_of: Callable[[slice], Tensor],
    comm: Communicator,
    device: torch.device,
    chunk: int,
) -> Tensor:
    """A table of `total` rows, `(total, width)`, in float64 on the CPU, of which each worker computes a share.

    Args:
        encoder: the encoder, which is in evaluation mode meanwhile.
        total: number of rows.
        width: numbers in a row.
        rows_of: computes the rows of a slice of `range(total)`, with forwards of the encoder; the slice may be empty.
        comm: the workers.
        device: device of the encoder.
        chunk: number of rows computed at a time.
    """
    was_training = encoder.training
    encoder.eval()
    start, end = comm.row_range(total, chunk)
    forwards = -(-(end - start) // chunk)
    if encoder.sharded:  # forwards gather weights, so every worker runs the same number
        forwards = comm.all_reduce_max(forwards)
    parts = [torch.empty(0, width, device=device, dtype=torch.float64)]
    with torch.no_grad():
        for number in range(forwards):
            first = start + number * chunk
            parts.append(rows_of(slice(first, min(end, first + chunk))).double())
        table = comm.all_gather(torch.cat(parts), start, total)
    encoder.train(was_training)
    return table.cpu()
