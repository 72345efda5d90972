"""Tells whether equal steps on a GPU have equal bits, with `scaling.deterministic` and without, and the cost.

    python -m benchmarks.gpu --only repeat --json OUT [--model roberta-base] [--documents 16]

A run that continues after a kill has the bits of a quiet one only if equal steps have equal results. Each mode takes
the same steps from the same weights; a hash of the parameters tells whether they agree. Each run of steps has its own
process, and the modes take turns. One process takes the second half of the steps alone, as after a resume, and one
begins with an empty cache of compiled kernels.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import record, workload
from declutr.trainer.worker.device import repeat_bits

_WARM_UP, _STEPS, _ROUNDS = 10, 30, 3
_RATES = {"kernel": 0.0, "dropout": 0.1}  # dropout of attention weights: torch's kernel, or the one of this project
_CACHES = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def steps(
    options: argparse.Namespace, rate: float, deterministic: bool, middle: Path, cold: bool = False
) -> tuple[str, float]:
    """Take steps from the seed's weights, or from `middle`, else written there; the parameters' hash, step seconds."""
    if cold:
        os.environ.update({name: str(middle.with_name(name)) for name in _CACHES})
    if deterministic:
        repeat_bits()
    else:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG")  # set by the package; for an ordinary process of torch
    setting = workload.Workload.of(options, "cuda", "bf16", dropout=0.1, attention_dropout=rate)
    train_step = setting.train_step(setting.encoder(compiled=True), late=True)
    batches = [setting.batch(step * options.documents, options.documents) for step in range(_STEPS)]
    train_step.warm_up({"": batches[0]})  # as the trainer does
    half, seconds, optimizer = _STEPS // 2, list[float](), train_step.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if middle.is_file():
        kept = torch.load(middle, weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept["parameters"], strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(kept["optimizer"])
    else:
        seconds = workload.seconds_of_steps(train_step, batches[:half], first=1)
        kept = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}
        torch.save(kept, middle)
    seconds += workload.seconds_of_steps(train_step, batches[half:], first=half + 1)
    return workload.checksum(train_step)[:16], statistics.median(seconds[_WARM_UP:])


def repeated(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of both modes in turns, with each kernel; passed if deterministic steps have equal bits."""
    torch.cuda.empty_cache()  # other processes need the memory
    figures = {name: _measure(options, rate) for name, rate in _RATES.items()}
    return {"passed": all(kernel["repeats"]["deterministic"] for kernel in figures.values()), **figures}


def _measure(options: argparse.Namespace, rate: float) -> dict[str, Any]:
    rounds: dict[str, list[tuple[str, float]]] = {"free": [], "deterministic": []}
    context = multiprocessing.get_context("spawn")

    def take(deterministic: bool, middle: Path, cold: bool = False) -> tuple[str, float]:
        with ProcessPoolExecutor(1, context) as pool:  # the mode of a process cannot be taken back
            return pool.submit(steps, options, rate, deterministic, middle, cold).result()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(_ROUNDS):
            for mode, ends in rounds.items():
                ends.append(take(mode == "deterministic", folder / f"{mode}{number}"))
        seconds = {mode: [time for _, time in ends] for mode, ends in rounds.items()}
        of_others = {
            "resumed": take(True, folder / "deterministic0")[0],
            "empty cache": take(True, folder / "cold", cold=True)[0],
        }
    digests = {mode: {digest for digest, _ in ends} for mode, ends in rounds.items()}
    return {
        "repeats": {
            "free": len(digests["free"]) == 1,
            "deterministic": digests["deterministic"] == {*of_others.values()},
        },
        "processes": {mode: sorted(values) for mode, values in digests.items()} | of_others,
        "seconds": {mode: [round(time, 5) for time in times] for mode, times in seconds.items()},
        **record.ratios(seconds["deterministic"], seconds["free"]),
    }
