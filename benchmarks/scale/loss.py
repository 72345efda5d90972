"""Cost of the contrastive loss against the batch, for `benchmarks.scale`."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import gloo
from benchmarks.record import figure
from declutr.trainer.objectives.declutr.ntxent import ntxent
from declutr.trainer.objectives.row_shard import RowShard
from declutr.trainer.parallel.communicator import Communicator

_MIB = 2**20
_SHARES = 4  # workers whose share of the loss is measured


def _seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of one thread."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def share_seconds(comm: Communicator, rows: int, size: int, seed: int) -> float:
    """Processor seconds of this worker's share of NT-Xent, forward and backward."""
    pairs = rows // 2
    row_shard = RowShard(comm, pairs * comm.rank // comm.size, pairs * (comm.rank + 1) // comm.size, pairs)
    embeddings = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), requires_grad=True)

    def step() -> None:
        ntxent(embeddings, 0.05, row_shard=row_shard).backward()

    step()
    return min(_seconds(step) for _ in range(3))


def loss_figures(given: argparse.Namespace) -> dict[str, Any]:
    """Measure NT-Xent, whole and shared, and the gather against the batch.

    Args:
        given: options of `benchmarks.scale`.
    """
    size, generator = 768, torch.Generator().manual_seed(given.seed)
    seconds = {}
    for rows in given.rows:
        embeddings = torch.randn(rows, size, generator=generator, requires_grad=True)

        def step(embeddings: Tensor = embeddings) -> None:
            ntxent(embeddings, 0.05).backward()

        step()
        seconds[rows] = min(_seconds(step) for _ in range(5))  # the minimum, because other programs use this machine
    largest = max(seconds)
    per_score = seconds[largest] / largest**2
    shares = gloo.run(_SHARES, share_seconds, largest, size, given.seed)
    per_shared_score = max(shares) * _SHARES / largest**2
    rows = 4 * given.batch
    # Scores: once in the forward for half the pairs, and again, with two products, in the backward.
    flops = 2 * size * rows**2 * (0.5 + 0.5 + 1.0)
    bytes_ = rows * size * 4
    return {
        "measured": {str(r): figure(s, "s", "measured", f"{r} rows, forward and backward") for r, s in seconds.items()},
        "per_score": figure(1e9 * per_score, "ns", "computed", f"time / rows^2 at {largest} rows, width {size}"),
        "share_measured": figure(max(shares), "s", "measured", f"a worker's share of {largest} rows among {_SHARES}"),
        "per_shared_score": figure(1e9 * per_shared_score, "ns", "computed", f"time x {_SHARES} / rows^2"),
        "rows": figure(rows, "rows", "computed", "2 anchors and 2 mean positives a document"),
        "gathered": figure(bytes_ / _MIB, "MiB", "computed", "rows x 768 x 4, on every rank; gradients too"),
        "gather_seconds": figure(2 * bytes_ / (given.network_gb * 1e9), "s", "computed", "ring: 2 x bytes / link"),
        "loss_here": figure(per_score * rows**2, "s", "computed", "per_score x rows^2, this CPU"),
        "loss_on_gpu": figure(
            flops / (given.gpu_tflops * 1e12), "s", "computed", "2 x 768 x 2 x rows^2 / assumed rate"
        ),
        "share_here": figure(per_shared_score * rows**2 / given.ranks, "s", "computed", "rows^2 / ranks, this CPU"),
        "share_on_gpu": figure(
            1.5 * flops / given.ranks / (given.gpu_tflops * 1e12),
            "s",
            "computed",
            "2 x 768 x 3 x rows^2 / ranks / rate",
        ),
        "network": figure(given.network_gb, "GB/s", "assumed", "of a rank's link"),
        "gpu": figure(given.gpu_tflops, "TFLOP/s", "assumed", "reached in float32/TF32 products of the loss"),
    }
