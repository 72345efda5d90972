"""Tells whether equal steps on a GPU have equal bits, with `scaling.deterministic` and without, and the cost.

    python -m benchmarks.gpu.repeat --json OUT [--model roberta-base] [--documents 16] [--steps 30]

A run that continues after a kill has the bits of a quiet one only if equal steps have equal results. Each mode takes
the same steps several times from the same weights; a hash of the parameters tells whether they agree. Each run of steps
has its own process, and the modes take turns.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import record
from benchmarks.workload import models, packed
from declutr.trainer.setup.torch_settings import repeat_bits

_WARM_UP = 10
_RATES = {"kernel": 0.0, "dropout": 0.1}
"""Dropout of attention weights: torch's kernel, or the one of this project."""


def steps(options: argparse.Namespace, rate: float, deterministic: bool) -> tuple[str, float]:
    """Take steps from the weights of the seed in this process; the hash of all parameters, and a step's seconds."""
    if deterministic:
        repeat_bits()
    else:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")  # set by the package; for an ordinary process of torch
    workload = packed.Workload.of(options, "cuda", "bf16", dropout=0.1, attention_dropout=rate)
    encoder = models.encoder(workload.size, workload.dropout, workload.seed, rate, compiled=True).to(workload.device)
    train_step = workload.train_step(encoder, late=True)
    batches = [workload.batch(step * options.documents, options.documents) for step in range(options.steps)]
    seconds = []
    for step, batch in enumerate(batches, start=1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        train_step.begin({"": batch}, step)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    found = hashlib.sha256()
    for parameter in encoder.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16], statistics.median(seconds[_WARM_UP:])


def measure(options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Take the steps of both modes in turns."""
    modes = {"free": False, "deterministic": True}
    found: dict[str, list[tuple[str, float]]] = {mode: [] for mode in modes}
    context = multiprocessing.get_context("spawn")
    for _ in range(options.rounds):
        for mode, deterministic in modes.items():
            with ProcessPoolExecutor(1, context) as pool:
                found[mode].append(pool.submit(steps, options, rate, deterministic).result())
    seconds = {mode: [one for _, one in rounds] for mode, rounds in found.items()}
    return {
        "repeats": {mode: len({digest for digest, _ in rounds}) == 1 for mode, rounds in found.items()},
        "seconds": {mode: [round(one, 5) for one in each] for mode, each in seconds.items()},
        **record.ratios(seconds["deterministic"], seconds["free"]),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("gpu.repeat", __doc__)
    options.add_argument("--model", choices=models.SIZES, default="roberta-base")
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=[32, 512])
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args(arguments)
    if given.steps <= _WARM_UP:
        options.error(f"--steps {given.steps}: the first {_WARM_UP} steps are not timed, so there must be more")
    if not torch.cuda.is_available():
        sys.exit(f"no GPU: torch {torch.__version__} finds no CUDA device")
    figures: dict[str, Any] = {"benchmark": "gpu.repeat", "model": given.model, "documents": given.documents}
    for name, rate in _RATES.items():
        record.progress(f"{name} ...")
        figures[name] = measure(given, rate)
        record.progress(f"{name}: {figures[name]}")
    record.publish({**figures, **record.facts("gpu.repeat", given.commit)}, given.json)
    if failed := [name for name in _RATES if not figures[name]["repeats"]["deterministic"]]:
        sys.exit(f"equal steps have other bits: {', '.join(failed)}")


if __name__ == "__main__":
    main()
