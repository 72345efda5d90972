"""Workload of the fault matrix: a tiny corpus and an encoder of thirty thousand parameters."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from declutr.common import seeding

_GEOMETRY = {"num_anchors": 2, "max_tokens": 64}
_BATCH = 8
_HELD_OUT = 0.05
WATCHDOG_TIMEOUT_SECONDS = 15.0
_FROM_CONFIG = {
    "model_type": "roberta",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 72,
}


def write_corpus(path: Path, steps: int, seed: int) -> None:
    """Write JSON lines of random words, enough for one epoch of this many steps and a few held-out documents.

    A document uses few words, so that its spans resemble each other.
    """
    rng = np.random.default_rng(seeding.torch_seed(seed, "chaos corpus"))
    letters = np.array(list("abcdefghijklmnop"))
    words = ["".join(rng.choice(letters, rng.integers(2, 7))) for _ in range(300)]
    with path.open("w", encoding="utf-8") as stream:
        for number in range(round(steps * _BATCH / (1 - 2 * _HELD_OUT))):
            topic = rng.choice(words, 40)
            stream.write(json.dumps({"text": f"{' '.join(rng.choice(topic, rng.integers(120, 181)))} {number}"}) + "\n")


def prepare_values(corpus: Path, output: Path) -> dict[str, Any]:
    """The `prepare` section for this corpus."""
    return {
        "output": str(output),
        "corpus": {"kind": "files", "paths": [str(corpus)]},
        "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
        "geometry": _GEOMETRY,
        "validation_fraction": _HELD_OUT,
        "unit_mib": 1,
        "session": {"num_cpus": 1},
    }


def train_values(data: Path, run: Path, steps: int, seed: int) -> dict[str, Any]:
    """The `train` section: within one epoch, with dropout and a queue, so that state can be lost."""
    return {
        "run": str(run),
        "data": str(data),
        "encoder": {"from_config": _FROM_CONFIG, "dropout": 0.1},
        "objective": {"queue_size": 24},
        "spans": {**_GEOMETRY, "num_positives": 2, "min_tokens": 16},
        "optim": {"lr": 0.0002},
        "batch_documents": _BATCH,
        "steps": steps,
        "seed": seed,
        "validation": {"every_steps": steps // 2, "max_documents": 40},
        "checkpoint": {"every_steps": 20, "keep_last": 4},
        "scaling": {
            "num_workers": 2,
            "device": "cpu",
            "data_cpus": 1,
            "watchdog_timeout_seconds": WATCHDOG_TIMEOUT_SECONDS,
            "elastic_resize_interval_seconds": 5,
        },
    }
