"""Whether steps on a GPU repeat their bits, and what deterministic algorithms of torch cost.

    python -m benchmarks.gpu.repeat --json OUT [--model roberta-base] [--documents 16] [--steps 10]

A run that continues after a kill has the bits of a quiet one only if equal steps have equal results. Each mode
takes the same steps several times from the same weights; a hash of the parameters tells whether they agree. Modes take
turns, so that other programs affect all of them.

| mode | `torch.use_deterministic_algorithms` |
| --- | --- |
| `free` | off |
| `strict` | on: an operation without a deterministic algorithm is an error |
| `filled` | as `strict`, with torch's default of filling new memory |
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; mode `strict` refuses without

import argparse
import hashlib
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils import deterministic

from benchmarks import record
from benchmarks.workload import models, packed
from declutr.trainer.data.batches import RankBatch

_MODES = {"free": (False, False), "strict": (True, False), "filled": (True, True)}
_ROUNDS = 3
_DROPOUTS = {"hidden": 0.0, "hidden_and_attention": 0.1}
"""Dropout of attention weights: torch's kernel, or the one of this project."""


def run(workload: packed.Workload, batches: list[RankBatch], compiled: bool) -> tuple[str, list[float]]:
    """Take one step a batch from the weights of the seed; the hash of all parameters, and seconds of each step."""
    size, dropout, seed = workload.size, workload.dropout, workload.seed
    encoder = models.encoder(size, dropout, seed, workload.attention_dropout, compiled=compiled).to(workload.device)
    train_step = workload.train_step(encoder, late=True)
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
    return found.hexdigest()[:16], seconds


def measure(workload: packed.Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of all modes in turns."""
    batches = [workload.batch(step * options.documents, options.documents) for step in range(options.steps)]
    hashes: dict[str, list[str]] = {mode: [] for mode in _MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in _MODES}
    refused: dict[str, str] = {}
    for number in range(_ROUNDS):
        for mode, (enabled, fills) in _MODES.items():
            if mode in refused:
                continue
            torch.use_deterministic_algorithms(enabled)
            deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            try:
                found, times = run(workload, batches, options.compile)
            except RuntimeError as error:
                refused[mode] = str(error).partition("\n")[0]
                continue
            finally:
                torch.use_deterministic_algorithms(False)
            hashes[mode].append(found)
            if number:  # the first round compiles
                seconds[mode] += times[2:]
    medians = {mode: round(statistics.median(times), 5) for mode, times in seconds.items() if times}
    return {
        "repeats": {mode: len(set(found)) == 1 for mode, found in hashes.items() if found},
        "hashes": hashes,
        "refused": refused,
        "seconds": medians,
        "ratio_to_free": {mode: round(median / medians["free"], 4) for mode, median in medians.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("gpu.repeat", __doc__)
    options.add_argument("--model", choices=models.SIZES, default="roberta-base")
    options.add_argument("--documents", type=int, default=16)
    options.add_argument("--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=[32, 512])
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--no-compile", dest="compile", action="store_false")
    given = options.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit(f"no GPU: torch {torch.__version__} finds no CUDA device")
    figures: dict[str, Any] = {"benchmark": "gpu.repeat", "model": given.model, "documents": given.documents}
    for name, rate in _DROPOUTS.items():
        record.progress(f"dropout of {name} ...")
        figures[name] = measure(packed.Workload.of(given, "cuda", "bf16", dropout=0.1, attention_dropout=rate), given)
        record.progress(f"{figures[name]}")
    record.publish({**figures, **record.facts("gpu.repeat", given.commit)}, given.json)


if __name__ == "__main__":
    main()
