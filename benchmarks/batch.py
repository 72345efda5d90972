"""Peak memory of one step as the batch grows and the microbatch does not.

    python -m benchmarks.batch --json OUT [--sizes 16 64 256 1024 4096] [--model demo]
    python -m benchmarks.batch --objective simcse --json OUT

Each size runs in a separate process: first a small step, which creates the optimizer's state, then a step of that many
documents or sentences. Its peak is reported above the memory that the process held after loading its libraries. It
includes weights, gradients, optimizer state and the batch. `declutr verify-gradients` compares the gradient of
microbatches with that of the whole batch.
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import record
from benchmarks.workload import OBJECTIVES, SIZES, Workload
from declutr.trainer.build import autocast_type

ROWS = {"declutr": (16, 64, 256, 1024, 4096), "simcse": (64, 256, 1024, 4096, 16384)}
# 64 documents fill a microbatch (13,000 tokens), and so do 64 sentences in two views (2,894 tokens with seed 0): with a
# larger one, the growth from 64 on would be that of the microbatch.
_MICROBATCH_TOKENS = {"declutr": 8192, "simcse": 2900}
_FIRST = 16  # documents of the step that creates the optimizer's state
# glibc returns freed memory to the system, so that the peak is memory in use and not memory kept by its heap.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def measure(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure one size in this process."""
    device = torch.device(options.device)
    settings: dict[str, Any] = {"dropout": options.dropout}
    if options.objective != "declutr":  # SimCSE has the settings of its unsupervised run
        settings |= {"objective": OBJECTIVES[options.objective], "pooling": "cls"}
    workload = Workload.of(options, options.device, options.precision, **settings)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # so that CUDA's own memory is not counted
    before = record.reset_peak(device)
    encoder = workload.encoder()
    train_step = workload.train_step(encoder, options.microbatch_tokens)
    train_step.step({"": workload.batch(0, min(_FIRST, count))}, 1)
    measured = workload.batch(0, count)
    record.reset_peak(device)
    begun = time.perf_counter()
    train_step.step({"": measured}, 2)
    return {
        "peak_mib": round(record.peak(device) - before, 1),
        "span_embeddings_mib": round(measured.spans.num_spans * encoder.embedding_size * 4 / record.MIB, 2),
        "seconds": round(time.perf_counter() - begun, 3),
        "precision": options.precision or ("fp32" if autocast_type("auto", device) is None else "bf16"),
        "tokens": measured.spans.num_tokens,
        "spans": measured.spans.num_spans,
        "microbatches": len(train_step.tasks[0].cut(measured)),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = record.parser("batch", __doc__)
    record.add_device(parser)
    parser.add_argument("--objective", choices=tuple(ROWS), default="declutr")
    defaults = "; ".join(f"{name}: {' '.join(map(str, sizes))}" for name, sizes in ROWS.items())
    parser.add_argument("--sizes", type=int, nargs="+", help=f"documents or sentences per step; default: {defaults}")
    parser.add_argument("--model", choices=SIZES, help="default: demo on cpu, distilroberta on cuda")
    parser.add_argument(
        "--spans", type=int, nargs=2, metavar=("MIN", "MAX"), help="tokens; default: 8 64 on cpu, 32 512 on cuda"
    )
    parser.add_argument("--microbatch-tokens", type=int, help="default: 8192 on cpu (simcse 2900), 65536 on cuda")
    parser.add_argument("--dropout", type=float, default=0.1)
    options = record.parse(parser, arguments)
    small = options.device == "cpu"
    options.model = options.model or ("demo" if small else "distilroberta")
    options.spans = options.spans or ([8, 64] if small else [32, 512])
    options.microbatch_tokens = options.microbatch_tokens or (_MICROBATCH_TOKENS[options.objective] if small else 65536)
    by_size, context = dict[int, dict[str, Any]](), multiprocessing.get_context("spawn")
    for size in options.sizes or ROWS[options.objective]:
        with patch.dict(os.environ, _ALLOCATOR), ProcessPoolExecutor(1, context) as pool:  # a fresh process
            by_size[size] = pool.submit(measure, options, size).result()
        record.progress(f"{size} rows: {by_size[size]}")
    peaks = {size: figures["peak_mib"] for size, figures in by_size.items()}
    settings = ("objective", "model", "device", "spans", "dropout", "microbatch_tokens")
    figures = {
        "benchmark": "batch",
        **{name: getattr(options, name) for name in settings},
        "peak_mib": peaks,
        "ratio_4096_to_64": _growth(peaks, 4096),
        "ratio_16384_to_64": _growth(peaks, 16384),
        "sizes": by_size,
    }
    record.publish(figures, options)


def _growth(peaks: dict[int, float], size: int) -> float | None:
    """The peak of this size over that of 64; None if one was not measured."""
    return round(peaks[size] / peaks[64], 4) if {64, size} <= peaks.keys() else None


if __name__ == "__main__":
    main()
