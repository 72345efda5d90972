"""Peak memory of one step as the batch grows and the microbatch does not.

    python -m benchmarks.step.batch --json OUT [--sizes 16 64 256 1024 4096] [--model demo]
    python -m benchmarks.step.batch --objective simcse --json OUT

Each size runs in a separate process: first a small step, which creates the optimizer's state, then a step of that many
documents or sentences. Its peak is reported above the memory that the process held after loading its libraries. It
includes weights, gradients, optimizer state and the batch; tensors with a row per span or anchor are also counted
separately. If the whole batch fits at once, its gradient without microbatches is compared with the one with them.
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import memory, record
from benchmarks.workload import models, packed
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.step.step import TrainStep

SIZES = {"declutr": (16, 64, 256, 1024, 4096), "simcse": (64, 256, 1024, 4096, 16384)}
# 64 documents fill a microbatch (13,000 tokens), and so do 64 sentences in two views (2,894 tokens with seed 0): with a
# larger one, the growth from 64 on would be that of the microbatch.
_MICROBATCH_TOKENS = {"declutr": 8192, "simcse": 2900}
_FIRST = 16  # documents of the step that creates the optimizer's state
# glibc returns freed memory to the system, so that the peak is memory in use and not memory kept by its heap.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def measure(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure one size in this process."""
    device = torch.device(options.device)
    workload = workload_of(options)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # so that CUDA's own memory is not counted
    before = memory.reset_peak(device)
    encoder = workload.encoder()
    train_step = workload.train_step(encoder, options.microbatch_tokens)
    train_step.step({"": workload.batch(0, min(_FIRST, count))}, 1)
    measured = workload.batch(0, count)
    memory.reset_peak(device)
    begun = time.perf_counter()
    rows = {measured.spans.num_spans, measured.num_rows, 2 * measured.num_rows}
    with memory.EmbeddingState(rows, encoder.embedding_size) as counted:
        train_step.step({"": measured}, 2)
    figures: dict[str, Any] = {
        "peak_mib": round(memory.peak(device) - before, 1),
        "embedding_state_mib": round(counted.peak_bytes / memory.MIB, 2),
        "span_embeddings_mib": round(measured.spans.num_spans * encoder.embedding_size * 4 / memory.MIB, 2),
        "seconds": round(time.perf_counter() - begun, 3),
        "tokens": measured.spans.num_tokens,
        "spans": measured.spans.num_spans,
        "microbatches": len(train_step.tasks[0].microbatch.cut(measured.spans)),
    }
    if count <= options.direct_limit:
        figures["grad_rel_diff"] = difference(train_step, measured, options.microbatch_tokens)
    return figures


def workload_of(options: argparse.Namespace) -> packed.Workload:
    """Build the workload of the objective; SimCSE has the settings of its unsupervised run."""
    if options.objective == "declutr":
        return packed.Workload.of(options, options.device, options.precision, dropout=options.dropout)
    settings = {"objective": packed.OBJECTIVES[options.objective], "dropout": options.dropout, "pooling": "cls"}
    return packed.TextWorkload.of(options, options.device, options.precision, **settings)


def difference(train_step: TrainStep, batch: RankBatch, microbatch_tokens: int) -> float:
    """Largest difference of gradient entries between microbatches and the whole batch, over the largest entry."""
    found = []
    for limit in (microbatch_tokens, None):
        train_step.optimizer.zero_grad(set_to_none=True)
        train_step.tasks[0].microbatch.max_tokens = limit
        train_step.gradients({"": batch}, 4)
        parameters = train_step.encoder.named_parameters()
        found.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
    cut, direct = found
    largest = max(float(gradient.abs().max()) for gradient in direct.values())
    return max(float((cut[name] - gradient).abs().max()) for name, gradient in direct.items()) / largest


def in_own_process(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure one size in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, _ALLOCATOR), ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, options, count).result()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("step.batch", __doc__)
    record.add_device(options)
    options.add_argument("--objective", choices=tuple(SIZES), default="declutr")
    known = "; ".join(f"{name}: {' '.join(map(str, sizes))}" for name, sizes in SIZES.items())
    options.add_argument("--sizes", type=int, nargs="+", help=f"documents or sentences per step; default: {known}")
    options.add_argument("--model", choices=models.SIZES, help="default: demo on cpu, distilroberta on cuda")
    options.add_argument("--microbatch-tokens", type=int, help="default: 8192 on cpu (simcse 2900), 65536 on cuda")
    options.add_argument("--dropout", type=float, default=0.1)
    options.add_argument(
        "--direct-limit", type=int, help="compare gradients up to this many rows; default: 64, simcse 256"
    )
    given = options.parse_args(arguments)
    small = given.device == "cpu"
    given.model = given.model or ("demo" if small else "distilroberta")
    given.spans = given.spans or ([8, 64] if small else [32, 512])
    if given.direct_limit is None:
        given.direct_limit = 64 if given.objective == "declutr" else 256
    given.sizes = given.sizes or SIZES[given.objective]
    given.microbatch_tokens = given.microbatch_tokens or (_MICROBATCH_TOKENS[given.objective] if small else 65536)
    found = {}
    for size in given.sizes:
        found[size] = in_own_process(given, size)
        record.progress(f"{size} rows: {found[size]}")
    peaks = {size: figures["peak_mib"] for size, figures in found.items()}
    differences = [figures["grad_rel_diff"] for figures in found.values() if "grad_rel_diff" in figures]
    figures = {
        "benchmark": "batch",
        "objective": given.objective,
        "model": given.model,
        "device": given.device,
        "precision": "bf16" if record.autocast_type(given.precision, given.device) else "fp32",
        "spans": given.spans,
        "dropout": given.dropout,
        "microbatch_tokens": given.microbatch_tokens,
        "peak_mib": peaks,
        "ratio_4096_to_64": _growth(peaks, 4096),
        "ratio_16384_to_64": _growth(peaks, 16384),
        "grad_rel_diff": max(differences, default=None),
        "sizes": found,
        **record.facts("step.batch", given.commit),
    }
    record.publish(figures, given.json)


def _growth(peaks: dict[int, float], size: int) -> float | None:
    """The peak of this size over that of 64; None if one was not measured."""
    return round(peaks[size] / peaks[64], 4) if {64, size} <= peaks.keys() else None


if __name__ == "__main__":
    main()
