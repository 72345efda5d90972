"""What a working folder already has: shards, the start and runs, refused if they are of other settings."""

from pathlib import Path

from declutr.common.stores.address import is_remote
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys
from declutr.pipeline.shards.manifest import MANIFEST, data_hash, load_manifest
from declutr.reproduction.item import ReproduceError
from declutr.trainer.driver.checks import changes, read_resume_settings
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.geometry import with_geometry


def shards_ready(config: PipelineConfig) -> bool:
    """True if the shards are complete.

    Raises:
        ReproduceError: they were prepared with other settings.
        ShardError: their manifest is damaged.
    """
    if not (Path(config.output) / MANIFEST).is_file():
        return False
    manifest = load_manifest(Path(config.output))
    if manifest.config_hash != config_hash(config):
        others = ", ".join(differing_keys(config, manifest.config))
        raise ReproduceError(f"{config.output}: was prepared with other settings ({others}); name another --work")
    return True


def run_ready(config: TrainConfig) -> bool:
    """True if the run has finished.

    Raises:
        ReproduceError: its folder has a run of other settings.
    """
    folder = Path(config.run)
    before = read_resume_settings(folder)
    if before is not None:
        now = with_geometry(config, folder, {}).resume_settings()  # a run keeps the geometry it started with
        if changed := changes(before, now):
            told = "; ".join(changed)
            raise ReproduceError(
                f"{folder}: was trained with other settings ({told}); name another --work, or delete it"
            )
    return (folder / "summary.json").is_file()


def data_identity(config: TrainConfig) -> dict[str, str]:
    """Hash of the shards of each place that a run reads; "" for those that are not on this machine."""
    return {
        place: ""
        if is_remote(place) or not (Path(place) / MANIFEST).is_file()
        else data_hash(load_manifest(Path(place)))
        for task in config.tasks().values()
        for place in task.places
    }
