"""Settings of `declutr adapt`, and the configurations of the steps that follow from them."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.paths import expand
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.setup.config import TrainConfig

PASSAGE_TOKENS = 62
"""Tokens of a passage without special ones."""
WINDOW_TOKENS = 64
FAR_TOKENS = PASSAGE_TOKENS + 96
"""Tokens between the starts of two passages of which one must find the other."""
LONG_TOKENS = (1 - (-FAR_TOKENS // WINDOW_TOKENS)) * WINDOW_TOKENS
"""Tokens of the shortest document with two such passages: 256, because passages start with windows."""
HELD_OUT = 0.4
"""Share of the documents that is not trained on: half of it chooses, the other half reports."""
BATCH_DOCUMENTS = 64


class AdaptConfig(Strict):
    """Settings of an adaptation."""

    encoder: str
    """Folder or name of the encoder to start from."""
    corpus: list[str] = Field(min_length=1)
    """Files, folders or globs of documents."""
    format: Literal["auto", "jsonl", "text", "text_file", "parquet", "arrow", "csv", "tsv"] = "auto"
    """Format of the corpus, as `corpus.format` of `prepare`."""
    text_field: list[str] = Field(default=["text"], min_length=1)
    """Column or columns with the text of a document."""
    pairs: str | None = None
    """File with the user's own queries and answers (`declutr evaluate --pairs`); it becomes the primary measure."""
    stsb: str | None = None
    """Folder of STS-B with sts-test.csv, to measure what was lost in general."""
    minutes: float = Field(default=30, gt=0, le=10_000)
    """Time for everything, also over several starts of the command; it decides the number of training steps."""
    steps: int | None = Field(default=None, ge=0)
    """Steps of the training; null: ten passes over the documents, or as many as there is time for. 0: none, so that
    only the closed form is tried."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the split, the training and the intervals."""
    trust_remote_code: bool = False
    """Run Python code that comes with the encoder. Only for encoders you trust."""


def located(config: AdaptConfig) -> AdaptConfig:
    """The settings with absolute paths, because workers run in other folders.

    Raises:
        UsageError: a path that cannot exist.
    """
    places = {
        name: value and str(expand(value).absolute()) for name in ("pairs", "stsb") for value in [getattr(config, name)]
    }
    if expand(config.encoder).is_dir():
        places["encoder"] = str(expand(config.encoder).absolute())
    corpus = [path if "://" in path else str(expand(path).absolute()) for path in config.corpus]
    return config.model_copy(update=places | {"corpus": corpus})


def prepare_config(config: AdaptConfig, output: Path, address: str | None = None) -> PipelineConfig:
    """The preparation of the corpus with the encoder's tokenizer: documents of at least two windows."""
    field = config.text_field[0] if len(config.text_field) == 1 else config.text_field
    settings: dict[str, Any] = {
        "output": str(output),
        "corpus": {"kind": "files", "paths": config.corpus, "format": config.format, "text_field": field},
        "tokenizer": {"kind": "pretrained", "name": config.encoder, "trust_remote_code": config.trust_remote_code},
        "geometry": {"num_anchors": 1, "max_tokens": WINDOW_TOKENS},
        "short_documents": "fewer_anchors",
        "validation_fraction": HELD_OUT,
        "session": {"address": address},
        "seed": config.seed,
    }
    return PipelineConfig.model_validate(settings)


def train_config(
    config: AdaptConfig, data: Path, run: Path, steps: int, pooling: str, address: str | None = None
) -> TrainConfig:
    """The training: one anchor a document, and a positive far from it.

    Args:
        config: what to adapt.
        data: the prepared corpus.
        run: folder of the run.
        steps: number of optimizer steps.
        pooling: of the encoder.
        address: of a Ray cluster.
    """
    settings: dict[str, Any] = {
        "run": str(run),
        "data": str(data),
        "encoder": {
            "pretrained": config.encoder,
            "trust_remote_code": config.trust_remote_code,
            "pooling": pooling,
            "dropout": 0.0,
        },
        "spans": {
            "num_anchors": 1,
            "num_positives": 1,
            "min_tokens": WINDOW_TOKENS // 2,
            "max_tokens": WINDOW_TOKENS,
            "strategy": "distant",
            "min_distance_tokens": 96,
        },
        "objective": {"kind": "declutr", "terms": "contrastive", "loss": {"temperature": 0.05}},
        "optim": {"lr": 5e-5, "weight_decay": 0.01, "schedule": "linear", "warmup_ratio": 0.1, "max_grad_norm": 1.0},
        "batch_documents": BATCH_DOCUMENTS,
        "microbatch_tokens": 8192,
        "steps": steps,
        "seed": config.seed,
        "validation": {"every_steps": 0},
        "scaling": {"num_workers": 1, "cpus_per_worker": 2 if address else os.cpu_count() or 1, "address": address},
    }
    return TrainConfig.model_validate(settings)
