"""Settings and tokenizers for small corpora of every kind of content, and their preparation without Ray."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import sentence

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.job.selection import most_frequent_labels, write_selected
from declutr.pipeline.job.units import plan_units, read_unit
from declutr.pipeline.job.worker import CANDIDATES, write_unit
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards
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
    """Settings for files of images or audio."""
    return lambda content, *paths, **changes: settings(tmp_path, {"content": content}, paths, changes)


@pytest.fixture
def rows_of():
    """Reads the records of a corpus, with content."""

    def read(config: PipelineConfig) -> list:
        units, problems = plan_units(config.corpus, config.unit_mib, None, config.content)
        assert problems == []
        return [record for unit in units for record in read_unit(unit, config.corpus, config.content)]

    return read


def prepared(config: PipelineConfig, folder: Path, tokenizer):
    """Prepares all units in this process: the manifest and the ledger."""
    skipped = Skipped()
    units, problems = plan_units(config.corpus, config.unit_mib, skipped, config.content)
    assert problems == []
    sidecars = [write_unit(unit, folder, config, tokenizer) for unit in units]
    if config.duplicates.enabled:
        names, labels = [unit.name for unit in units], most_frequent_labels(sidecars, config.content)
        table = find_duplicates(folder / CANDIDATES, names, config.duplicates, labels=labels)
        table.replace(folder / DUPLICATES)
        sidecars = [write_selected(unit, folder, config, tokenizer) for unit in units]
    facts = config.geometry, identity(config), config_hash(config), skipped.kinds()
    manifest = build_manifest(sidecars, tokenizer, *facts)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    assert check_shards(folder, full=True) == []
    ledger = [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]
    totals = manifest.totals
    assert totals["read"] == len(ledger) == totals["kept"] + totals["dropped"] + totals["failed"]
    return manifest, ledger


@pytest.fixture
def prepare_units(output):
    """Prepares texts: the manifest, the ledger and the folder."""
    folder, tokenizer = output
    return lambda config: (*prepared(config, folder, tokenizer), folder)


@pytest.fixture
def prepare_media(tmp_path: Path):
    """Prepares images or audio: the manifest, the ledger by source and offset, and the folder."""

    def run(config: PipelineConfig, folder: Path | None = None):
        folder = folder or tmp_path / "out"
        folder.mkdir(exist_ok=True)
        manifest, ledger = prepared(config, folder, None)
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


@pytest.fixture
def write_jsonl():
    """Writes objects, or lines given as bytes; returns the path."""

    def write(path: Path, *rows) -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
        path.write_bytes(b"\n".join(lines))
        return path

    return write


@pytest.fixture
def make_pair():
    return lambda premise, hypothesis, label: {"premise": premise, "hypothesis": hypothesis, "label": label}
