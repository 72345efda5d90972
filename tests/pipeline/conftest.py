"""A small corpus and a tokenizer trained on it, for tests without Ray."""

from pathlib import Path

import pytest
from corpora import sentence

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer((sentence(number, 60) for number in range(50)), 300)


@pytest.fixture
def output(tmp_path: Path, tokenizer):
    """An output folder with a tokenizer, and its facts."""
    folder = tmp_path / "out"
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    return folder, describe_tokenizer(tokenizer, "train")


@pytest.fixture
def make_config(tmp_path: Path):
    def make(*paths: Path, **changes) -> PipelineConfig:
        values = {
            "output": str(tmp_path / "out"),
            "corpus": {"kind": "files", "paths": [str(path) for path in paths]},
            "tokenizer": {"kind": "train", "vocab_size": 300, "sample_mib": 0.1},
            "geometry": {"num_anchors": 1, "max_tokens": 16},
            "validation_fraction": 0.3,
            "duplicates": {"exact": False},
        }
        return PipelineConfig.model_validate(values | changes)

    return make
