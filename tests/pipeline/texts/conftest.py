"""Rows of short texts as `prepare` makes them, without Ray."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.shards.shards import ShardSet

LABELS = {-1: None, 0: "entailment", 1: "neutral", 2: "contradiction"}


@pytest.fixture
def make_texts(tmp_path: Path):
    """Settings for files with rows of one kind."""

    def make(content, *paths: Path, **changes) -> PipelineConfig:
        values = {
            "output": str(tmp_path / "out"),
            "corpus": {"kind": "files", "paths": [str(path) for path in paths]},
            "tokenizer": {"kind": "train", "vocab_size": 300, "sample_mib": 0.1},
            "content": content,
            "validation_fraction": 0,
            "duplicates": {"exact": False},
        }
        return PipelineConfig.model_validate(values | changes)

    return make


@pytest.fixture
def rows_of():
    """Reads the records of a corpus, with content."""

    def read(config: PipelineConfig) -> list:
        units, problems = plan_units(config.corpus, config.unit_mib, None, config.content)
        assert problems == []
        return [record for unit in units for record in read_unit(unit, config.corpus, config.content)]

    return read


@pytest.fixture
def prepare_units(output):
    """Prepares all units of a corpus in this process: the manifest, the ledger and the folder."""
    folder, tokenizer = output

    def run(config: PipelineConfig):
        units, problems = plan_units(config.corpus, config.unit_mib, None, config.content)
        assert problems == []
        sidecars = [write_unit(unit, folder, config, tokenizer) for unit in units]
        manifest = build_manifest(sidecars, tokenizer, config.geometry, identity(config), config_hash(config))
        (folder / MANIFEST).write_text(manifest.model_dump_json())
        ledger = [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]
        assert manifest.totals["read"] == len(ledger)
        return manifest, ledger, folder

    return run


@pytest.fixture
def decode(tokenizer):
    """The texts and label names of all rows of a split."""

    def read(folder: Path, split: str = "train"):
        shards, found = ShardSet(folder, split), []
        for row in shards.take(range(shards.num_documents)).to_pylist():
            bounds = [*row["starts"], row["num_tokens"]]
            texts = [tokenizer.decode(row["tokens"][a:b]).strip() for a, b in pairwise(bounds)]
            found.append(list(zip(texts, [LABELS[label] for label in row["labels"]], strict=True)))
        return found

    return read


def jsonl(path: Path, *rows) -> Path:
    """Writes objects, or lines given as bytes."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def pair(premise, hypothesis, label):
    return {"premise": premise, "hypothesis": hypothesis, "label": label}


@pytest.fixture
def write_jsonl():
    return jsonl


@pytest.fixture
def make_pair():
    return pair
