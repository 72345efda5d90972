"""Settings and tokenizers for small corpora of every kind of content, and their preparation without Ray."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import sentence
from preparing import prepare_here

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer

TOKENIZER = {"kind": "train", "vocab_size": 300, "sample_mib": 0.1}
LABELS = {-1: None, 0: "entailment", 1: "neutral", 2: "contradiction"}


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer((sentence(number, 60) for number in range(50)), 300)


@pytest.fixture
def output(tmp_path: Path, tokenizer):
    """An output folder with a tokenizer, and its facts."""
    folder = tmp_path / "out"
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    return folder, describe_tokenizer(tokenizer, "train")


def settings(folder: Path, own, paths, changes) -> PipelineConfig:
    corpus = {"kind": "files", "paths": [str(path) for path in paths]}
    values = {"output": str(folder / "out"), "corpus": corpus, "duplicates": {"exact": False}, "validation_fraction": 0}
    return PipelineConfig.model_validate(values | own | changes)


@pytest.fixture
def make_config(tmp_path: Path):
    """Settings for files of long documents."""
    own = {"tokenizer": TOKENIZER, "geometry": {"num_anchors": 1, "max_tokens": 16}, "validation_fraction": 0.3}
    return lambda *paths, **changes: settings(tmp_path, own, paths, changes)


@pytest.fixture
def make_texts(tmp_path: Path):
    """Settings for files with rows of short texts of one kind."""
    own = {"tokenizer": TOKENIZER}
    return lambda content, *paths, **changes: settings(tmp_path, own | {"content": content}, paths, changes)


@pytest.fixture
def make_media(tmp_path: Path):
    return lambda content, *paths, **changes: settings(tmp_path, {"content": content}, paths, changes)


@pytest.fixture
def write_config(tmp_path: Path):
    """Writes settings into a file for the command; returns its path."""

    def write(config: PipelineConfig) -> str:
        (tmp_path / "config.yaml").write_text(json.dumps({"prepare": config.model_dump(mode="json")}))
        return str(tmp_path / "config.yaml")

    return write


@pytest.fixture
def prepare_units(output):
    folder, tokenizer = output
    return lambda config: (*prepare_here(config, folder, tokenizer), folder)


@pytest.fixture
def prepare_media(tmp_path: Path):
    """Prepares images or audio: the manifest, the ledger by source and offset, and the folder."""

    def run(config: PipelineConfig, folder: Path | None = None):
        folder = folder or tmp_path / "out"
        folder.mkdir(exist_ok=True)
        manifest, ledger = prepare_here(config, folder, None)
        return manifest, {(entry.source, entry.offset): entry for entry in ledger}, folder

    return run


@pytest.fixture
def decode(tokenizer):
    """The texts and label names of all rows of a split."""

    def read(folder: Path, split: str = "train"):
        shards, rows = ShardSet(folder, split), []
        for row in shards.take(range(shards.num_documents)).to_pylist():
            bounds = [*row["starts"], row["num_tokens"]]
            texts = [tokenizer.decode(row["tokens"][a:b]).strip() for a, b in pairwise(bounds)]
            rows.append(list(zip(texts, [LABELS[label] for label in row["labels"]], strict=True)))
        return rows

    return read
