"""Preparation of images and sounds without Ray."""

from pathlib import Path

import pytest

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.job.selection import most_frequent_labels, write_selected
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import CANDIDATES, write_unit
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.shards.shards import check_shards


@pytest.fixture
def make_media(tmp_path: Path):
    """Settings for files of images or audio."""

    def make(content, *paths: Path, **changes) -> PipelineConfig:
        values = {
            "output": str(tmp_path / "out"),
            "corpus": {"kind": "files", "paths": [str(path) for path in paths]},
            "content": content,
            "validation_fraction": 0,
            "duplicates": {"exact": False},
        }
        return PipelineConfig.model_validate(values | changes)

    return make


@pytest.fixture
def prepare_media(tmp_path: Path):
    """Prepares all units in this process: the manifest, the ledger by source and offset, and the folder."""

    def run(config: PipelineConfig, folder: Path | None = None):
        folder, skipped = folder or tmp_path / "out", Skipped()
        folder.mkdir(exist_ok=True)
        units, problems = plan_units(config.corpus, config.unit_mib, skipped, config.content)
        assert problems == []
        sidecars = [write_unit(unit, folder, config, None, None) for unit in units]
        if config.duplicates.enabled:
            names, labels = [unit.name for unit in units], most_frequent_labels(sidecars, config.content)
            found = find_duplicates(folder / CANDIDATES, names, config.duplicates, labels=labels)
            found.replace(folder / DUPLICATES)
            sidecars = [write_selected(unit, folder, config, None) for unit in units]
        settings = config.geometry, identity(config), config_hash(config), skipped.kinds()
        manifest = build_manifest(sidecars, None, *settings)
        (folder / MANIFEST).write_text(manifest.model_dump_json())
        assert check_shards(folder, full=True) == []
        entries = [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]
        totals = manifest.totals
        assert totals["read"] == len(entries) == totals["kept"] + totals["dropped"] + totals["failed"]
        return manifest, {(entry.source, entry.offset): entry for entry in entries}, folder

    return run
