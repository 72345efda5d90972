"""What a validation reads beside the run's own held-out rows, named by its content."""

from declutr.common.errors import DataError, RemoteError, ShardError, UsageError
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.pipeline.shards.manifest import Manifest, data_hash, load_manifest
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs
from declutr.trainer.setup.cache import data_folder
from declutr.trainer.setup.config import TrainConfig


def scored_contents(config: TrainConfig) -> tuple[dict[str, str], dict[str, str], Manifest | None]:
    """Hashes of what `validation.data`, `stsb` and `sickr` name on this host, and what is wrong with the others.

    Returns:
        Hashes by setting; setting and reason of each that cannot be read; the manifest of `validation.data`, if it can
        be read. All are empty if no validation takes place.
    """
    validation, contents, unreadable = config.validation, dict[str, str](), dict[str, str]()
    manifest = None
    if validation.data is not None and validation.every_steps:
        try:
            manifest = load_manifest(data_folder(validation.data, config.cache))
            contents["data"] = data_hash(manifest)
        except (ShardError, RemoteError, UsageError, OSError) as error:
            unreadable["validation.data"] = f"validation.data = {validation.data}: {error}"
    for score, place in validation.pairs.items():
        name = score.partition("_")[0]
        try:
            read_pairs(folder := expand(place), FILES[score])
            contents[name] = hash_file(folder / FILES[score].name)
        except (DataError, UsageError) as error:
            unreadable[f"validation.{name}"] = f"validation.{name} = {place}: {error}"
    return contents, unreadable, manifest
