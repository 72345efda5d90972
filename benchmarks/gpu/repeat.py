"""Tells whether equal steps on a GPU have equal bits, with `scaling.deterministic` and without, and the cost.

    python -m benchmarks.gpu --only repeat --json OUT [--model roberta-base] [--documents 16]

A run that continues after a kill has the bits of a quiet one only if equal steps have equal results. Each mode takes
the same steps several times from the same weights; a hash of the parameters tells whether they agree. Each run of steps
has its own process, and the modes take turns.
"""

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import record, workload
from declutr.trainer.worker.device import repeat_bits

_WARM_UP, _STEPS, _ROUNDS = 10, 30, 3
_RATES = {"kernel": 0.0, "dropout": 0.1}
"""Dropout of attention weights: torch's kernel, or the one of this project."""


def steps(options: argparse.Namespace, rate: float, deterministic: bool) -> tuple[str, float]:
    """Take steps from the weights of the seed in this process; the hash of all parameters, and a step's seconds."""
    if deterministic:
        repeat_bits()
    else:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")  # set by the package; for an ordinary process of torch
    setting = workload.Workload.of(options, "cuda", "bf16", dropout=0.1, attention_dropout=rate)
    train_step = setting.train_step(setting.encoder(compiled=True), late=True)
    batches = [setting.batch(step * options.documents, options.documents) for step in range(_STEPS)]
    seconds = workload.seconds_of_steps(train_step, batches, first=1)
    return workload.checksum(train_step)[:16], statistics.median(seconds[_WARM_UP:])


def repeated(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of both modes in turns, with each kernel; passed if deterministic steps have equal bits."""
    torch.cuda.empty_cache()  # other processes need the memory
    figures = {name: _measure(options, rate) for name, rate in _RATES.items()}
    return {"passed": all(kernel["repeats"]["deterministic"] for kernel in figures.values()), **figures}


def _measure(options: argparse.Namespace, rate: float) -> dict[str, Any]:
    modes = {"free": False, "deterministic": True}
    rounds: dict[str, list[tuple[str, float]]] = {mode: [] for mode in modes}
    context = multiprocessing.get_context("spawn")
    for _ in range(_ROUNDS):
        for mode, deterministic in modes.items():
            with ProcessPoolExecutor(1, context) as pool:  # the mode of a process cannot be taken back
                rounds[mode].append(pool.submit(steps, options, rate, deterministic).result())
    seconds = {mode: [time for _, time in ends] for mode, ends in rounds.items()}
    return {
        "repeats": {mode: len({digest for digest, _ in ends}) == 1 for mode, ends in rounds.items()},
        "seconds": {mode: [round(time, 5) for time in times] for mode, times in seconds.items()},
        **record.ratios(seconds["deterministic"], seconds["free"]),
    }
