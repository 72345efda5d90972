"""Shards of images and sounds, prepared without Ray."""

from mediafiles import spread

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest


def prepare_media(folder, content, files):
    """A folder of shards of these files, without Ray."""
    values = {
        "output": str(folder / "out"),
        "corpus": {"kind": "files", "paths": [str(spread(folder / "in", files))]},
        "content": content,
        "validation_fraction": 0.2,
        "duplicates": {"exact": False},
    }
    config = PipelineConfig.model_validate(values)
    (unit,), _ = plan_units(config.corpus, config.unit_mib, None, config.content)
    (folder / "out").mkdir()
    sidecar = write_unit(unit, folder / "out", config, None, None)
    manifest = build_manifest([sidecar], None, config.geometry, identity(config), config_hash(config))
    (folder / "out" / MANIFEST).write_text(manifest.model_dump_json())
    return folder / "out", manifest
